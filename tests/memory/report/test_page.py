import math
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from operator import mul
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_memory import (
    MemoryBreakdown,
    ModuleMemory,
    RankSummary,
    merge_summaries,
    plot_memory,
    write_page,
)
from drivetrain_memory.report.chart import AREA_COLOURS, LINE_COLOURS, Line, line_chart
from drivetrain_memory.report.page import render_page
from drivetrain_memory.report.quantities import bytes_text, number_text, seconds_text
from drivetrain_memory.tracker.rank_summary import PhaseUse, SampledPeak
from drivetrain_memory.tracker.timeline import Timeline

HOSTILE = "<script>document.title='owned'</script><img src=http://198.51.100.1/x onerror=alert(1)>\"'&"


def summary(rank: int = 0, *, text: str = "forward") -> RankSummary:
    values = {
        "host/resident_bytes": (1e9, 2e9, math.nan, 1.5e9),
        "cgroup/limit_bytes": (4e9,) * 4,
        "cuda:0/allocated_bytes": (5e8, 7e8, 7e8, 6e8),
        "cuda:0/reserved_bytes": (8e8,) * 4,
    }
    return RankSummary(
        rank=rank,
        host=text,
        pid=1,
        started_at=1.7e9 + rank,
        seconds=8.0,
        interval_seconds=0.1,
        num_samples=80,
        num_lost=2,
        sampling_cpu_seconds=0.02,
        host_peak_bytes=2_100_000_000 + rank,
        host_source="kernel",
        device_peaks={"cuda:0": 750_000_000},
        peaks={"host/resident_bytes": SampledPeak(value=2e9, seconds=2.0, phase=text, step=1)},
        phases={text: PhaseUse(count=3, seconds=1.5, host_peak_bytes=2_000_000_000, host_added_bytes=5)},
        timeline=Timeline(
            bucket_seconds=2.0,
            columns=tuple(values),
            values=values,
            phases=({text: 0.5}, {}, {text: 1.0}, {}),
        ),
        models={"cuda:0": text},
        absent_drivers={"amd": text},
        breakdown=MemoryBreakdown(
            by_device={"cuda:0": {"parameters": 100, "rest": 50}},
            modules=(ModuleMemory(name=text, kind=text, parameters=100),),
            shared={text: text},
        ),
    )


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    return found


@pytest.mark.costly
@pytest.mark.slow
def test_a_browser_shows_the_page_and_runs_nothing_of_hostile_names(tmp_path: Path) -> None:
    page = write_page(tmp_path / "page.html", merge_summaries([summary(0, text=HOSTILE), summary(1)]))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [chromium(), *options, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=120,
    )
    shown = done.stdout
    assert "<title>Memory of a run</title>" in shown
    assert "owned" not in re.sub(r"<[^>]*>", "", shown).replace("&lt;script&gt;document.title='owned'", "")
    assert "<script" not in shown
    assert "<img" not in shown
    assert shown.count("<svg") == 4  # host and device of both ranks
    for text in ("2.10 GB", "750.00 MB", "forward (rank 1)", "Where it went: rank 0"):
        assert text in shown


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    text = render_page(merge_summaries([summary(text=HOSTILE)]), title=HOSTILE)
    assert "default-src 'none'" in text
    # No element of ours fetches; names are text.
    assert not re.search(r"<(?:script|img|link|iframe|object|embed)\b", text)
    assert not re.search(r"\b(?:src|href)=[\"']", text.replace("&quot;", ""))
    assert "url(" not in text


def test_what_is_no_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"run=\[\]: must be a RunMemory, as read_summaries\(folder\) returns it"
    ):
        write_page(tmp_path / "new" / "page.html", [])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_many_ranks_are_in_the_tables_and_the_highest_are_drawn() -> None:
    text = render_page(merge_summaries([summary(rank) for rank in range(20)]))
    assert text.count("<svg") == 2 * 16
    assert "Rank 19: process on" in text
    assert "Rank 3: process on" not in text
    assert "3 (forward, pid 1)" in text


def test_a_run_without_samples_has_a_page() -> None:
    empty = replace(
        summary(),
        peaks={},
        phases={},
        breakdown=None,
        timeline=Timeline(bucket_seconds=1.0, columns=(), values={}, phases=()),
    )
    assert "Time line" in render_page(merge_summaries([empty]))


@given(st.lists(st.one_of(st.just(math.nan), st.floats(0, 1e18)), max_size=20))
def test_a_chart_stays_in_its_frame(values: list[float]) -> None:
    drawn = line_chart([Line(label="a", values=values)], bucket_seconds=1.0)
    points = re.findall(r"[ML ](-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'd="([^"]*)"', drawn)))
    assert all(76 <= float(x) <= 921 and 9 <= float(y) <= 201 for x, y in points)
    assert "nan" not in drawn


def test_each_subject_has_a_scale_of_its_own_and_the_page_cache_comes_last() -> None:
    alone = summary()
    values = {**alone.timeline.values, "cgroup/held_bytes": (3e9,) * 4, "cgroup/cache_bytes": (24e9,) * 4}
    text = render_page(merge_summaries([replace(alone, timeline=replace(alone.timeline, values=values))]))
    assert re.findall("<h3>Rank 0: ([^<]*)", text) == [
        "process on forward",
        "cuda:0 (forward)",
        "control group",
        "page cache of the control group",
    ]
    charts = re.findall("<svg.*?</svg>", text, re.DOTALL)
    assert [re.findall(r'text-anchor="end">([^<]*B)<', chart)[-1] for chart in charts] == [
        "2.00 GB",
        "800.00 MB",
        "4.00 GB",
        "24.00 GB",
    ]
    assert ["forward: 50%" in chart for chart in charts] == [True, True, False, False]


def test_a_line_without_numbers_takes_no_colour_from_the_others() -> None:
    lines = [
        Line(label=label, values=values) for label, values in (("a", [0.0]), ("b", [math.nan]), ("c", [1.0]))
    ]
    assert f'stroke="{LINE_COLOURS[2]}"' in line_chart(lines, bucket_seconds=1.0)
    assert line_chart(lines[:2], bucket_seconds=1.0) == ""


# Machado, Oliveira and Fernandes (2009): what protanopes, deuteranopes and tritanopes see of linear red, green, blue.
SIGHTS = (
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
)
TO_XYZ = ((0.4339, 0.3763, 0.1899), (0.2126, 0.7152, 0.0722), (0.0178, 0.1095, 0.8729))  # white is (1, 1, 1)


def seen(colour: str, sight: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return a colour of CSS as L*, a*, b* of CIELAB, as a sight has it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    light = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    for matrix in (sight, TO_XYZ):
        light = [max(0.0, sum(map(mul, row, light))) for row in matrix]
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in light)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("text_colour", ["#000000", "#ffffff"])
def test_lines_and_phases_differ_for_colour_blind_people_too(text_colour: str) -> None:
    colours = [text_colour if each == "currentColor" else each for each in (*LINE_COLOURS, *AREA_COLOURS)]
    for one, other in combinations(colours, 2):
        for sight in SIGHTS:
            assert math.dist(seen(one, sight), seen(other, sight)) > 10, (one, other)


def test_numbers_have_units() -> None:
    assert [bytes_text(size) for size in (0, 999, 1500, 2e6, 12_340_000_000)] == [
        "0 B",
        "999 B",
        "1.50 kB",
        "2.00 MB",
        "12.34 GB",
    ]
    assert [seconds_text(seconds) for seconds in (0.5, 61, 7500)] == ["0.5 s", "1 min 01 s", "2 h 05 min"]
    assert number_text("nvidia:0/power_watts", 350.4) == "350 W"
    assert number_text("a/temperature_celsius", math.nan) == "-"


def test_the_plot_has_a_line_for_each_rank_and_device(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = plot_memory(merge_summaries([summary(0), summary(1)]))
    host, device = figure.axes
    assert [line.get_label() for line in host.lines] == ["rank 0: resident", "rank 1: resident"]
    assert [axes.get_title() for axes in (host, device)] == ["host", "cuda:0"]
    figure.savefig(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 5000
