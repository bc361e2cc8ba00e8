"""The keys of a hang's questions and answers, on the stores that process groups are made with."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from drivetrain_state.hang.report import Answer
from drivetrain_state.hang.rounds import HangRounds, Verdict
from drivetrain_state.store_probe import store_address

WAIT = timedelta(seconds=20)


def tcp_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=WAIT)


@pytest.fixture(params=["tcp", "file", "hash"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made = {"tcp": tcp_store, "file": lambda: FileStore(str(tmp_path / "store"), 2), "hash": HashStore}
    return PrefixStore("default_pg", made[request.param]())


def eventually(read: Callable[[], object], expected: object) -> None:
    """A TCPStore confirms no write: another client sees it a moment later."""
    while read() != expected:
        time.sleep(0.01)


def answer(rank: int) -> Answer:
    return Answer(
        rank=rank,
        host="node",
        pid=7,
        idle_seconds=61.0,
        label="batch",
        where="train.py:1 main",
        call="",
        waits=True,
        stuck=True,
        stack="",
    )


def test_a_question_is_asked_once_and_answered_by_each(store: Store) -> None:
    first, second = HangRounds(store, rank=0), HangRounds(store, rank=1)
    assert first.newest() == second.newest() == 0
    first.ask(0)
    second.ask(0)  # at the same moment, before it has seen the other's
    assert first.newest() == second.newest() == 1
    second.answer(1, answer(1))
    assert not first.has_answered(1, 0)
    eventually(lambda: first.answers(1, range(2)), {1: answer(1)})
    first.ask(1)
    second.answer(2, answer(1))
    eventually(lambda: first.answers(1, range(2)), {})  # nothing piles up in a run of weeks
    for each in (first, second):
        each.close()


def test_one_rank_reports_and_all_learn_what_it_found(store: Store) -> None:
    first, second = HangRounds(store, rank=0), HangRounds(store, rank=1)
    assert second.verdict(1) is None
    assert second.claim_report(1)
    assert not first.claim_report(1)
    verdict = Verdict(text="rank 0 sleeps", blocked=True, witness=1, stacks="hang.txt")
    second.conclude(1, verdict)
    eventually(lambda: first.verdict(1), verdict)
    assert first.resumed(1) is None
    second.resume(1, "rank 1 went on")
    eventually(lambda: first.resumed(1), "rank 1 went on")
    for each in (first, second):
        each.close()


def test_a_goodbye_is_remembered_until_the_rank_comes_back(store: Store) -> None:
    first, second = HangRounds(store, rank=0), HangRounds(store, rank=1)
    assert first.departures(range(3)) == {}
    second.depart("finished")
    eventually(lambda: first.departures(range(3)), {1: "finished"})
    again = HangRounds(store, rank=1)
    eventually(lambda: first.departures(range(3)), {})
    for each in (first, second, again):
        each.close()


def test_a_store_whose_process_has_ended_is_a_connection_error(capfd: pytest.CaptureFixture[str]) -> None:
    host = tcp_store()
    rounds = HangRounds(host, rank=1)
    del host
    time.sleep(0.5)  # the server's thread closes the connections
    with pytest.raises(ConnectionError, match="hosts the rendezvous store has ended"):
        rounds.newest()
    rounds.close()
    assert "recvValue" not in capfd.readouterr().err


def test_the_address_of_a_store_is_where_its_server_listens() -> None:
    host = tcp_store()
    assert store_address(PrefixStore("a", PrefixStore("b", host))) == f"127.0.0.1:{host.port}"
    assert store_address(HashStore()) == "HashStore"
