"""Rounds of answers, on the stores that process groups are made with."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from drivetrain_state.store_rounds import StoreRounds, store_address, wait

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


@pytest.fixture
def clients(store: Store) -> Iterator[tuple[StoreRounds, StoreRounds]]:
    """The clients of two ranks, each on a connection of its own."""
    first, second = (StoreRounds(store.clone(), rank=rank) for rank in range(2))
    yield first, second
    first.close()
    second.close()


Clients = tuple[StoreRounds, StoreRounds]


def test_a_question_is_asked_once_and_answered_by_each(clients: Clients) -> None:
    first, second = clients
    assert first.newest() == second.newest() == 0
    first.ask(0)
    second.ask(0)  # at the same moment, before it has seen the other's
    assert first.newest() == second.newest() == 1
    second.answer(1, {"rank": 1, "idle_seconds": 61.0})
    assert first.answer_of(1, 0) is None
    eventually(lambda: first.answers(1, range(2)), {1: {"rank": 1, "idle_seconds": 61.0}})
    first.ask(1)
    second.answer(2, ["another"])
    second.answer(3, ["a third"])
    eventually(lambda: first.answers(1, range(2)), {})  # nothing piles up in a run of weeks
    assert first.answer_of(2, 1) == ["another"]  # which a rank may be reading


def test_one_rank_concludes_and_all_learn_what_it_found(clients: Clients) -> None:
    first, second = clients
    assert second.conclusion(1) is None
    assert second.count("reports/1", add=1) == 1
    assert first.count("reports/1", add=1) == 2
    verdict = {"text": "rank 0 sleeps", "blocked": True}
    second.conclude(1, verdict)
    eventually(lambda: first.conclusion(1), verdict)
    assert first.read("resumed/1") is None
    second.post("resumed/1", "rank 1 went on")
    eventually(lambda: first.read("resumed/1"), "rank 1 went on")


def test_a_goodbye_is_remembered_until_the_rank_comes_back(store: Store, clients: Clients) -> None:
    first, second = clients
    assert first.departures(range(3)) == {}
    second.depart("finished")
    eventually(lambda: first.departures(range(3)), {1: "finished"})
    StoreRounds(store.clone(), rank=1).arrive()
    eventually(lambda: first.departures(range(3)), {})


def test_of_a_round_that_is_over_nothing_stays(clients: Clients) -> None:
    first, second = clients
    second.answer(1, "yes")
    first.conclude(1, "done")
    eventually(lambda: second.conclusion(1), "done")
    first.forget(1, range(2))
    eventually(lambda: (second.conclusion(1), second.answers(1, range(2))), (None, {}))


def test_a_wait_ends_with_the_value_or_when_there_is_no_hope(clients: Clients) -> None:
    first, second = clients
    patience = iter([True, True, False])
    assert wait(lambda: first.conclusion(1), while_=lambda: next(patience)) is None
    second.conclude(1, "done")
    assert wait(lambda: first.conclusion(1), while_=lambda: True) == "done"

    def end_with_a_value() -> bool:
        second.conclude(2, "just in time")
        eventually(lambda: first.conclusion(2), "just in time")
        return False

    assert wait(lambda: first.conclusion(2), while_=end_with_a_value) == "just in time"


def test_a_store_whose_process_has_ended_is_a_connection_error(capfd: pytest.CaptureFixture[str]) -> None:
    host = tcp_store()
    rounds = StoreRounds(host.clone(), rank=1)
    assert rounds.newest() == 0
    del host
    time.sleep(0.5)  # the server's thread closes the connections
    for ask in (rounds.newest, lambda: rounds.depart("finished")):
        with pytest.raises(ConnectionError, match="hosts the rendezvous store has ended"):
            ask()
    rounds.close()
    assert "recvValue" not in capfd.readouterr().err


def test_the_address_of_a_store_is_where_its_server_listens() -> None:
    host = tcp_store()
    assert store_address(PrefixStore("a", PrefixStore("b", host))) == f"127.0.0.1:{host.port}"
    assert store_address(HashStore()) == "HashStore"
