"""An HTML page of a run's memory, which needs no other file and no network; it runs no script."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from drivetrain_memory.breakdown.memory_shares import KINDS, REST, MemoryBreakdown
from drivetrain_memory.report.chart import Line, area_colour, line_chart, phase_legend
from drivetrain_memory.report.quantities import bytes_text, highest, number_text, seconds_text
from drivetrain_memory.tracker.rank_summary import RankSummary, RunMemory

_MOST_CHARTS = 16  # ranks whose time line is drawn; tables hold all
_MOST_MODULES = 40
_PROCESS_LINES = {
    "host/resident_bytes": "resident",
    "host/proportional_bytes": "proportional (shared pages divided)",
    "children/resident_bytes": "children",
    "host/pinned_bytes": "pinned",
}
_DEVICE_LINES = {"allocated_bytes": "tensors", "reserved_bytes": "reserved", "used_bytes": "all processes"}
_HELD, _CACHE, _LIMIT = "cgroup/held_bytes", "cgroup/cache_bytes", "cgroup/limit_bytes"
# A browser obeys this even if a value were not escaped: nothing is fetched, no script runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 sans-serif; background: Canvas; color: CanvasText; max-width: 960px;
margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; } h3 { font-size: 1em; margin-bottom: .2em; }
table { border-collapse: collapse; } td, th { padding: .2em .7em; border-bottom: 1px solid #8886; text-align: right; }
td:first-child, th:first-child { text-align: left; } .scroll { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
.legend span { margin-right: 1.2em; white-space: nowrap; } .legend i { display: inline-block; width: .8em;
height: .8em; margin-right: .4em; border-radius: 2px; } .bar { display: flex; height: 22px; border-radius: 3px;
overflow: hidden; margin: .3em 0; } .note { opacity: .75; }
"""


def render_page(run: RunMemory, *, title: str = "Memory of a run") -> str:
    """Return the page as text: time line by rank with phases, peaks, and where memory went."""
    if not isinstance(run, RunMemory):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
        raise TypeError(f"run={run!r}: must be a RunMemory, as read_summaries(folder) returns it")
    named = [path for rank in run.ranks for path in rank.phases]
    sampled = [path for rank in run.ranks for shares in rank.timeline.phases for path in shares]
    phases = list(dict.fromkeys([*named, *sampled]))
    started = datetime.fromtimestamp(run.started_at, UTC)
    ranks = f"{len(run.ranks)} rank{'' if len(run.ranks) == 1 else 's'}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{ranks}, {seconds_text(run.seconds)}, began {started:%Y-%m-%d %H:%M:%S} UTC.</p>",
        "<h2>Time line</h2>",
        phase_legend(phases),
        *_time_lines(run, phases),
        "<h2>Peaks</h2>",
        _peaks(run),
        *([f"<h2>Phases</h2>{_phases(run)}"] if phases else []),
        *(
            line
            for rank in run.ranks[:_MOST_CHARTS]
            if rank.breakdown is not None
            for line in (f"<h2>Where it went: rank {rank.rank}</h2>", *_breakdown(rank.breakdown))
        ),
        "<h2>Highest samples</h2>",
        _highest(run),
        *_notes(run),
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def write_page(file: str | Path, run: RunMemory, *, title: str = "Memory of a run") -> Path:
    """Write the page of a run, as one file that a browser opens without a network, and return its path.

    Called on one rank, such as the first, after `read_summaries`. OSError if the file cannot be written.
    """
    path, text = Path(file), render_page(run, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _time_lines(run: RunMemory, phases: Sequence[str]) -> Iterable[str]:
    """Yield a chart for each subject of a rank, since its sizes may be a hundred times those of another."""
    by_peak = sorted(run.ranks, key=lambda rank: -rank.host_peak_bytes)[:_MOST_CHARTS]
    for rank in [rank for rank in run.ranks if rank in by_peak]:
        yield from _chart(rank, f"process on {rank.host}", _PROCESS_LINES, phases)
        columns = [name for name in rank.timeline.columns if name.endswith(("ated_bytes", "used_bytes"))]
        for device in dict.fromkeys(name.rpartition("/")[0] for name in columns):
            model = f" ({rank.models[device]})" if device in rank.models else ""
            lines = {f"{device}/{name}": label for name, label in _DEVICE_LINES.items()}
            yield from _chart(rank, f"{device}{model}", lines, phases)
        values = rank.timeline.values
        # A limit far above what is held would press its line to the ground.
        is_near = highest(values.get(_LIMIT, ()), default=math.inf) < 4 * highest(values.get(_HELD, ()))
        limit = {_LIMIT: "limit"} if is_near else {}
        yield from _chart(rank, "control group", {_HELD: "held, without droppable cache", **limit})
        yield from _chart(rank, "page cache of the control group", {_CACHE: "page cache"})
    if len(run.ranks) > _MOST_CHARTS:
        yield f'<p class="note">The {_MOST_CHARTS} ranks with the highest peaks are drawn; the tables hold all.</p>'


def _chart(
    rank: RankSummary, title: str, labels: Mapping[str, str], phases: Sequence[str] = ()
) -> Iterable[str]:
    """Yield the heading and the chart of a rank's columns; nothing if no column is above 0."""
    timeline = rank.timeline
    lines = [
        Line(label=label, values=timeline.values.get(name, ()), is_limit=name == _LIMIT)
        for name, label in labels.items()
    ]
    strip = timeline.phases if phases else ()
    seconds = timeline.bucket_seconds
    if chart := line_chart(lines, bucket_seconds=seconds, phases=strip, phase_names=phases):
        yield f"<h3>Rank {rank.rank}: {escape(title)}</h3>"
        yield chart


def _peaks(run: RunMemory) -> str:
    devices = list(dict.fromkeys(device for rank in run.ranks for device in rank.device_peaks))
    rows = [
        [
            f"{rank.rank} ({rank.host}, pid {rank.pid})",
            bytes_text(rank.host_peak_bytes),
            rank.host_source,
            _format_peak(rank, "children/resident_bytes"),
            _format_peak(rank, _HELD),
            _format_peak(rank, _LIMIT),
            *(bytes_text(rank.device_peaks.get(device, math.nan)) for device in devices),
        ]
        for rank in run.ranks
    ]
    head = ["rank", "process", "source", "children", "control group held", "its limit", *devices]
    note = (
        '<p class="note">Peaks of process and devices are those of the kernel and of the allocators; those of '
        "children and control group are the highest samples.</p>"
    )
    return _table(head, rows) + note


def _phases(run: RunMemory) -> str:
    rows = [
        [
            f"{path} (rank {rank.rank})",
            f"{use.count:,}",
            seconds_text(use.seconds),
            bytes_text(use.host_peak_bytes),
            bytes_text(use.host_added_bytes),
            bytes_text(use.device_peak_bytes) if use.device_peak_bytes else "-",
        ]
        for rank in run.ranks[:_MOST_CHARTS]
        for path, use in rank.phases.items()
    ]
    return _table(["phase", "runs", "time", "host peak", "added by a run", "device peak"], rows)


def _breakdown(breakdown: MemoryBreakdown) -> Iterable[str]:
    kinds = (*KINDS, REST)
    for device, held in breakdown.by_device.items():
        total = sum(held.values())
        if not total:
            continue
        yield f"<h3>{escape(device)}: {bytes_text(total)}</h3>"
        bars = [
            f'<div style="width:{100 * held.get(kind, 0) / total:.2f}%;background:{area_colour(index)}" '
            f'title="{kind.replace("_", " ")} {bytes_text(held.get(kind, 0))}"></div>'
            for index, kind in enumerate(kinds)
        ]
        yield f'<div class="bar">{"".join(bars)}</div>'
        yield phase_legend([f"{kind.replace('_', ' ')} {bytes_text(held.get(kind, 0))}" for kind in kinds])
    modules = breakdown.largest(_MOST_MODULES)
    head = ["module", "class", *(kind.replace("_", " ") for kind in KINDS), "together"]
    rows = [
        [
            module.name or "(the model)",
            module.kind,
            *(bytes_text(size) if (size := getattr(module, kind)) else "-" for kind in KINDS),
            bytes_text(module.total),
        ]
        for module in modules
    ]
    yield _table(head, rows)
    if left := len(breakdown.modules) - len(modules):
        yield f'<p class="note">{left} smaller modules are left out.</p>'
    if breakdown.shared:
        pairs = ", ".join(
            f"{name} = {first}" for name, first in list(breakdown.shared.items())[:_MOST_MODULES]
        )
        yield f'<p class="note">Counted once, under the second name: {escape(pairs)}.</p>'


def _highest(run: RunMemory) -> str:
    rows = [
        [
            name,
            number_text(name, peak.value),
            str(rank),
            seconds_text(peak.seconds),
            "-" if peak.step is None else str(peak.step),
            peak.phase or "-",
        ]
        for name, (rank, peak) in run.highest().items()
    ]
    return _table(["what", "highest", "rank", "after", "step", "phase"], rows)


def _notes(run: RunMemory) -> Iterable[str]:
    first = run.ranks[0]
    samples = sum(rank.num_samples for rank in run.ranks)
    cpu = max(rank.sampling_cpu_seconds / rank.seconds if rank.seconds else 0.0 for rank in run.ranks)
    yield (
        f'<p class="note">{samples:,} samples, every {seconds_text(first.interval_seconds)}; sampling took at most '
        f"{cpu:.2%} of a core.</p>"
    )
    if lost := sum(rank.num_lost for rank in run.ranks):
        yield f'<p class="note">{lost:,} samples could not be written to disk.</p>'
    for vendor, reason in first.absent_drivers.items():
        yield f'<p class="note">No numbers of {escape(vendor)} devices: {escape(reason)}.</p>'


def _format_peak(rank: RankSummary, name: str) -> str:
    return bytes_text(rank.peaks[name].value) if name in rank.peaks else "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>'
