import gc
import json
import logging
import math
import mmap
import os
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain_memory import MemoryTracker, RankSummary, merge_summaries, read_summaries, record_peak
from drivetrain_memory.tracker.memory_tracker import OTHER_PHASES, PhaseStack
from drivetrain_memory.tracker.rank_summary import write_summary
from drivetrain_memory.tracker.sample_recorder import SampleStream

MB = 2**20


def fill(megabytes: int) -> mmap.mmap:
    """Take pages of the system's own: malloc may reuse what earlier tests gave back."""
    pages = mmap.mmap(-1, megabytes * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:: mmap.PAGESIZE] = b"x" * (len(pages) // mmap.PAGESIZE)
    return pages


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RankSummary]:
    """A run of three steps with nested phases."""
    folder = tmp_path_factory.mktemp("run")
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(folder, rank=3, interval_seconds=0.01) as tracker:
        for _ in range(3):
            tracker.step()
            with tracker.phase("train"):
                with tracker.phase("forward"):
                    loss = model(torch.ones(10, 100)).sum()
                with tracker.phase("backward"):
                    loss.backward()
                    block = fill(100)
                    del block
            optimizer.step()
            time.sleep(0.05)
        tracker.record_breakdown(model, optimizer)
    return folder, tracker.summary()


def test_another_thread_may_stop_it(tmp_path: Path) -> None:
    tracker = MemoryTracker(tmp_path, rank=0, interval_seconds=0.01)
    tracker.start()
    stopped: list[RankSummary] = []
    thread = threading.Thread(target=lambda: stopped.append(tracker.stop()))
    thread.start()
    thread.join()
    assert read_summaries(tmp_path).ranks == tuple(stopped)
    with record_peak() as peak:  # the thread that started it can measure on
        block = fill(50)
        del block
    assert peak.host_bytes - peak.host_before_bytes > 49 * MB


def test_phases_nest_and_have_exact_peaks(tracked: tuple[Path, RankSummary]) -> None:
    phases = tracked[1].phases
    assert list(phases) == ["train/forward", "train/backward", "train"]
    assert [use.count for use in phases.values()] == [3, 3, 3]
    added = {path: use.host_added_bytes for path, use in phases.items()}
    assert added["train/backward"] > 99 * MB  # the spike lasted far less than a sample's interval
    assert added["train"] > 99 * MB
    assert added["train/forward"] < 50 * MB
    assert tracked[1].host_peak_bytes >= max(use.host_peak_bytes for use in phases.values())


def test_samples_are_json_lines_with_steps_and_phases(tracked: tuple[Path, RankSummary]) -> None:
    folder, summary = tracked
    header, *lines = (
        json.loads(line) for line in (folder / "memory-rank-00003.jsonl").read_text().splitlines()
    )
    assert (header["rank"], header["pid"]) == (3, os.getpid())
    assert len(lines) == summary.num_samples >= 3
    steps = [line["step"] for line in lines if "step" in line]
    assert steps == sorted(steps)
    assert set(steps) <= {0, 1, 2}  # a busy machine may sample no moment of a short step
    assert steps[-1] == 2
    assert max(line["host/resident_bytes"] for line in lines) == summary.peaks["host/resident_bytes"].value
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_the_summary_is_read_as_it_was_written(tracked: tuple[Path, RankSummary]) -> None:
    folder, summary = tracked
    (read,) = read_summaries(folder).ranks
    assert json.dumps(read.to_json()) == json.dumps(summary.to_json())
    assert read.breakdown is not None
    assert read.breakdown.totals["optimizer_states"] >= 2 * read.breakdown.totals["parameters"]


def test_ranks_are_merged_in_any_order(tracked: tuple[Path, RankSummary], tmp_path: Path) -> None:
    ranks = [replace(tracked[1], rank=rank, host_peak_bytes=rank) for rank in range(20)]
    shuffled = random.Random(0).sample(ranks, len(ranks))
    for summary in shuffled:
        write_summary(tmp_path, summary)
    merged = merge_summaries(shuffled)
    assert [one.rank for one in merged.ranks] == list(range(20))
    assert json.dumps(read_summaries(tmp_path).to_json()) == json.dumps(merged.to_json())
    rank, highest = merged.highest()["host/resident_bytes"]
    assert (rank, highest) == (0, tracked[1].peaks["host/resident_bytes"])


def test_what_cannot_be_merged_or_read_is_named(tracked: tuple[Path, RankSummary], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no summary to merge"):
        merge_summaries([])
    with pytest.raises(ValueError, match=r"several summaries of rank \[3\]"):
        merge_summaries([tracked[1], tracked[1]])
    with pytest.raises(FileNotFoundError, match=r"has no memory-rank-\*\.json"):
        read_summaries(tmp_path)
    (tmp_path / "memory-rank-00000.json").write_text('{"version": 9}')
    with pytest.raises(
        ValueError, match=r"memory-rank-00000.json as a summary of memory: a summary of version 9"
    ):
        read_summaries(tmp_path)


def test_the_newest_sample_is_flat_numbers_for_a_tracker() -> None:
    with MemoryTracker(None, interval_seconds=1.0) as tracker:
        metrics = tracker.as_metrics()
        assert len(tracker.samples()) == 1
    assert metrics["memory/host/resident_bytes"] > MB
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert all(name.startswith("memory/") for name in metrics)


def test_a_tracker_around_a_record_hides_no_peak() -> None:
    gc.collect()  # nothing of earlier tests is freed in the block
    with record_peak() as peak:
        with MemoryTracker(None) as tracker:
            with tracker.phase("a"):
                block = fill(120)
                del block
    assert peak.host_bytes - peak.host_before_bytes > 119 * MB


def test_an_error_in_a_phase_ends_it() -> None:
    with MemoryTracker(None) as tracker:
        with pytest.raises(KeyError, match="lost"), tracker.phase("a"), tracker.phase("b"):
            raise KeyError("lost")
        with tracker.phase("c"):
            pass
    assert list(tracker.summary().phases) == ["a/b", "a", "c"]


def test_names_without_end_count_as_one_phase() -> None:
    stack = PhaseStack()
    with record_peak(children=False) as peak:
        pass
    for number in range(100):
        before = stack.enter(f"phase {number}")
        stack.leave(before, 1.0, peak)
    assert len(stack.uses) == 65
    assert stack.uses[OTHER_PHASES].count == 36


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"interval_seconds=0: give 0\.001 to 3600"):
        MemoryTracker(None, interval_seconds=0)
    with pytest.raises(ValueError, match=r"interval_seconds='a': give 0\.001 to 3600"):
        MemoryTracker(None, interval_seconds="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank=-1: must be an integer, 0 or more"):
        MemoryTracker(None, rank=-1)
    with pytest.raises(ValueError, match="rank='a': must be an integer, 0 or more"):
        MemoryTracker(None, rank="a")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="this tracker is not started"):
        MemoryTracker(None).as_metrics()
    with MemoryTracker(None) as tracker:
        with pytest.raises(RuntimeError, match="was started before"):
            tracker.start()
        with (
            pytest.raises(ValueError, match="phase 'a/b': give a name without a slash"),
            tracker.phase("a/b"),
        ):
            pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wants /dev/full")
def test_a_full_disk_loses_samples_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        stream = SampleStream(Path("/dev/full"), {"rank": 0})
        for _ in range(25):
            stream.write(("a",), (1.0,), phase="", step=None)
        stream.close()
    assert stream.num_lost > 0
    assert len([one for one in caplog.records if "samples of memory are lost" in one.message]) == 1
