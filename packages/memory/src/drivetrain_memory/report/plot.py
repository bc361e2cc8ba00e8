"""A matplotlib figure of a run's memory."""

from typing import TYPE_CHECKING

from drivetrain_memory.tracker.rank_summary import RunMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GB = 1e9
_HOST = {"host/resident_bytes": "resident", "children/resident_bytes": "children"}


def plot_memory(run: RunMemory) -> "Figure":
    """Draw the memory of all ranks over time: the host above, each device below.

    Called on one rank, with the summaries from `read_summaries`. The figure belongs to no window;
    `figure.savefig("memory.png")` writes it. ImportError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_memory draws with matplotlib: pip install 'drivetrain-memory[plot]'"
        ) from error
    devices = list(
        dict.fromkeys(
            name.rpartition("/")[0]
            for rank in run.ranks
            for name in rank.timeline.columns
            if name.endswith("/allocated_bytes")
        )
    )
    figure = Figure(figsize=(9, 3.2 * (1 + len(devices))), layout="constrained")
    axes = figure.subplots(1 + len(devices), 1, squeeze=False)[:, 0]
    for place, title in enumerate(["host", *devices]):
        columns = _HOST if title == "host" else {f"{title}/allocated_bytes": "tensors"}
        for rank in run.ranks:
            offset = rank.started_at - run.started_at
            for name, label in columns.items():
                values = rank.timeline.values.get(name, ())
                if any(value > 0 for value in values):
                    times = [offset + index * rank.timeline.bucket_seconds for index in range(len(values))]
                    axes[place].plot(times, [v / _GB for v in values], label=f"rank {rank.rank}: {label}")
        axes[place].set_title(title)
        axes[place].set_ylabel("GB")
        axes[place].set_ylim(bottom=0)
        axes[place].legend(loc="lower right", fontsize="small")
    axes[-1].set_xlabel("seconds")
    return figure
