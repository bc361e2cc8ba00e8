"""The settings of tracking."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

OnError = Literal["raise", "warn"]


def _setting(default: Any, text: str, *, needs: str | None = "run.log_with", brief: str = "") -> Any:
    metadata = {"help": text, "brief": brief, "topic": "Results"}
    return field(default=default, metadata=metadata | ({"needs": needs} if needs else {}))


_MEASURES = "throughput or throughput_every_steps or live_line"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSettings:
    """The `tracking` section: reactions to failing trackers, flushes to disk, and the throughput."""

    on_error: OnError = _setting(  # noqa: RUF009 it returns a field
        "raise", "Handling of a failing tracker: raise ends the run, warn logs a warning and continues."
    )
    flush_seconds: float = _setting(
        1.0, "Seconds between flushes of the log to the disk: what a crash of the machine may lose."
    )
    drain_seconds: float = _setting(
        30.0, "Seconds that the end of a run waits for platforms to take what is left in the log."
    )
    record_info: bool = _setting(
        True, "Whether the log tells commit and changes, versions, hardware and command line."
    )

    throughput: bool = _setting(
        False,
        "Whether to measure samples, tokens and steps a second, and the time of each phase of a step.",
        needs=None,
        brief="Measure samples and tokens a second",
    )
    throughput_every_steps: int | None = _setting(
        None,
        "Optimizer steps between two logs of the throughput, each of which also looks for a rank that is slower than "
        "the others; turns the measuring on.",
        needs=None,
    )
    live_line: bool = _setting(
        False,
        "Whether rank 0 shows the throughput in a line on standard error; turns the measuring on.",
        needs=None,
    )
    token_field: str = _setting(
        "input_ids", "Field of a batch whose elements are counted as tokens.", needs=_MEASURES
    )
    flops_per_step: float | None = _setting(
        None,
        "Floating point operations of a step on all devices; none: counted in the first step.",
        needs=_MEASURES,
    )
    peak_flops: float | None = _setting(
        None, "Peak of one device in FLOP/s; none: from a table of known devices.", needs=_MEASURES
    )

    @property
    def measures_throughput(self) -> bool:
        """True if a setting asks for the throughput."""
        return self.throughput or self.throughput_every_steps is not None or self.live_line

    def __post_init__(self) -> None:
        """Check every field."""
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error={self.on_error!r}: say one of {', '.join(get_args(OnError))}")
        for name in ("flush_seconds", "drain_seconds"):
            if not (seconds := getattr(self, name)) > 0:
                raise ValueError(f"{name}={seconds!r}: must be above 0")
        every = self.throughput_every_steps
        if every is not None and every < 1:
            raise ValueError(
                f"throughput_every_steps={every!r}: must be at least 1 step, or none for no logs of the throughput"
            )
        for name in ("flops_per_step", "peak_flops"):
            number = getattr(self, name)
            if number is not None and not 0 < number < float("inf"):
                without = "they are counted" if name == "flops_per_step" else "a table of devices is asked"
                raise ValueError(
                    f"{name}={number!r}: must be finite and above 0; leave it out if it is unknown, and {without}"
                )
        if not self.token_field:
            raise ValueError("token_field='': must name a field of a batch, such as input_ids")
