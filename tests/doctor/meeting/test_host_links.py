import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest

from drivetrain_config.environ import child_environment
from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.links.pair_order import start_pairs
from drivetrain_doctor.links.pair_results import GroupResult, PairResult, judge_hosts
from drivetrain_doctor.meeting.conduct import measure_links, merge
from drivetrain_doctor.meeting.join import join


def told(*pairs: tuple[int, int], unfinished: tuple[tuple[int, int], ...] = ()) -> dict:  # type: ignore[type-arg]
    measured = tuple(
        PairResult(
            first=first,
            second=second,
            latency_seconds=1e-4,
            forward_bytes_per_second=1e9,
            backward_bytes_per_second=1e9,
        )
        for first, second in pairs
    )
    return asdict(GroupResult(backend="gloo", pairs=measured, unfinished=unfinished, failures={}))


def test_each_host_tells_the_pairs_whose_lower_rank_it_is() -> None:
    result = merge("gloo", {0: told((0, 1), (0, 2)), 3: told((1, 2)), 5: told()}, [0, 3, 5])
    assert sorted((pair.first, pair.second) for pair in result.pairs) == [(0, 1), (0, 2), (1, 2)]
    assert judge_hosts(result, ["host 0", "host 3", "host 5"]).findings == ()


def test_a_host_that_told_nothing_failed() -> None:
    result = merge("gloo", {0: told(unfinished=((0, 1),))}, [0, 4])
    assert result.failures == {1: "told nothing in time"}
    assert result.unfinished == ((0, 1),)


@pytest.mark.slow
def test_two_hosts_measure_their_pair_at_the_address_of_host_0(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", python)  # a program that begins with torch imported
    with socket.create_server(("127.0.0.2", 0)) as held:
        port = held.getsockname()[1]
    host_0 = CheckedRun(num_nodes=2, node_rank=0, master_addr="127.0.0.2", master_port=port, wait_seconds=60)
    meetings = [join(replace(host_0, node_rank=rank), progress=lambda _: None) for rank in range(2)]
    programs = [start_pairs(child_environment(GLOO_SOCKET_IFNAME=None)) for _ in meetings]
    with ThreadPoolExecutor(2) as threads:
        told = threads.map(measure_links, meetings, [(0, 1)] * 2, ["gloo"] * 2, programs)
        result = merge("gloo", dict(enumerate(told)), [0, 1])
    assert (result.failures, result.unfinished) == ({}, ())
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 1)]
