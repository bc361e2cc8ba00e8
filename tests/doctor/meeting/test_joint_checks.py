from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from drivetrain_config.environ import child_environment
from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.links.link_measurement import start_pairs
from drivetrain_doctor.links.link_results import GroupResult, PairResult, judge_hosts
from drivetrain_doctor.meeting.joint_checks import (
    file_in,
    judge_folder,
    judge_roster,
    list_hosts,
    measure_links,
    merge,
)
from drivetrain_doctor.meeting.meeting_store import join
from processes import free_port

ASKED = CheckedRun(num_nodes=4, node_rank=0, master_addr="node0", master_port=29500, wait_seconds=5)


def test_hosts_that_did_not_come_are_named_with_the_time() -> None:
    (finding,) = judge_roster(4, {0: "a", 2: "c"}, ASKED).findings
    assert (finding.severity, finding.what) == ("error", "hosts 1, 3 did not join within 5 s")
    assert "its own --node-rank" in finding.repair


def test_all_hosts_came() -> None:
    report = judge_roster(2, {0: "a", 1: "b"}, ASKED)
    assert (report.findings, report.summary) == ([], "2 of 2 hosts joined at node0:29500")


def test_many_hosts_are_cut_short() -> None:
    assert list_hosts([3]) == "host 3"
    assert list_hosts(range(1000)).endswith("14, 15, ...")


LABELS = {0: "host 0", 1: "host 1", 2: "host 2"}


def test_a_host_with_another_folder_is_named(tmp_path: Path) -> None:
    asked = CheckedRun(num_nodes=3, folder=tmp_path)
    (finding,) = judge_folder({1: True, 2: False}, LABELS, asked, is_writable=True).findings
    assert (finding.severity, finding.what) == (
        "warning",
        f"the folder {tmp_path} of host 0 does not exist on host 2",
    )
    assert judge_folder({1: True, 2: True}, LABELS, asked, is_writable=True).findings == []
    skipped = judge_folder({}, LABELS, asked, is_writable=False)
    assert skipped.is_skipped
    assert "cannot write" in skipped.summary


def test_the_file_is_there_during_the_block_alone(tmp_path: Path) -> None:
    with file_in(tmp_path) as name:
        assert (tmp_path / name).exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_has_no_file(tmp_path: Path) -> None:
    with file_in(tmp_path / "gone") as name:
        assert name == ""


def told(*pairs: tuple[int, int], unfinished: tuple[tuple[int, int], ...] = ()) -> dict:  # type: ignore[type-arg]
    rates = {"latency_seconds": 1e-4, "forward_bytes_per_second": 1e9, "backward_bytes_per_second": 1e9}
    measured = tuple(PairResult(first=first, second=second, **rates) for first, second in pairs)
    return asdict(GroupResult(backend="gloo", pairs=measured, unfinished=unfinished, failures={}))


def test_each_host_tells_the_pairs_whose_lower_rank_it_is() -> None:
    result = merge("gloo", {0: told((0, 1), (0, 2)), 3: told((1, 2)), 5: told()}, [0, 3, 5])
    assert sorted((pair.first, pair.second) for pair in result.pairs) == [(0, 1), (0, 2), (1, 2)]
    assert judge_hosts(result, ["host 0", "host 3", "host 5"]).findings == []


def test_a_host_that_told_nothing_failed() -> None:
    result = merge("gloo", {0: told(unfinished=((0, 1),))}, [0, 4])
    assert result.failures == {1: "sent no results in time"}
    assert result.unfinished == ((0, 1),)


@pytest.mark.slow
def test_two_hosts_measure_their_pair_at_the_address_of_host_0(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", python)  # a program that begins with torch imported
    port = free_port()
    host_0 = CheckedRun(num_nodes=2, node_rank=0, master_addr="127.0.0.2", master_port=port, wait_seconds=60)
    meetings = [join(replace(host_0, node_rank=rank), progress=lambda _: None) for rank in range(2)]
    programs = [start_pairs(child_environment(GLOO_SOCKET_IFNAME=None)) for _ in meetings]
    with ThreadPoolExecutor(2) as threads:
        told = threads.map(measure_links, meetings, [(0, 1)] * 2, ["gloo"] * 2, programs)
        result = merge("gloo", dict(enumerate(told)), [0, 1])
    assert (result.failures, result.unfinished) == ({}, ())
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 1)]
