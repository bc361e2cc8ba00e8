import subprocess
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from drivetrain_config.environ import RankEnvironment
from drivetrain_state import ConnectError
from drivetrain_state.process_identity import process_identity
from drivetrain_state.store_setup import meet


@pytest.fixture
def agent() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def launched(rank: int, agent: TCPStore, *, world_size: int = 2) -> RankEnvironment:
    return RankEnvironment(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=agent.port,
        agent_store=True,
    )


def met(agent: TCPStore, *, late_seconds: tuple[float, ...] = (0, 0)) -> list[Store]:
    """Let every rank come, each after its delay, in threads of this process."""

    def come(rank: int) -> Store:
        sleep(late_seconds[rank])
        return meet(launched(rank, agent, world_size=len(late_seconds)), timeout_seconds=20)

    with ThreadPoolExecutor(len(late_seconds)) as pool:
        return list(pool.map(come, range(len(late_seconds))))


def test_each_meeting_has_a_store_that_no_earlier_one_wrote_to(agent: TCPStore) -> None:
    for late_seconds in ((0, 0, 0), (0.1, 0, 0), (0, 0.1, 0.2)):
        stores = met(agent, late_seconds=late_seconds)
        assert not any(store.check(["address"]) for store in stores)
        stores[0].set("address", "here")
        assert [store.get("address") for store in stores] == [b"here"] * 3


def test_the_rank_that_does_not_come_is_named(agent: TCPStore) -> None:
    with pytest.raises(
        ConnectError, match=r"rank 0 waited 0 s .* for all of 3 ranks, and ranks 1, 2 did not come"
    ):
        meet(launched(0, agent, world_size=3), timeout_seconds=0.2)


def test_a_rank_that_waits_for_rank_0_says_so(agent: TCPStore) -> None:
    met(agent)
    with pytest.raises(ConnectError, match=r"rank 1 waited 0 s .* and rank 0 did not come"):
        meet(launched(1, agent), timeout_seconds=0.2)


def test_who_gave_up_and_comes_again_meets_the_others(agent: TCPStore) -> None:
    with pytest.raises(ConnectError, match="rank 1 did not come"):
        meet(launched(0, agent), timeout_seconds=0.2)
    assert len(met(agent)) == 2
    with pytest.raises(ConnectError, match="rank 0 did not come"):
        meet(launched(1, agent), timeout_seconds=0.2)
    assert len(met(agent)) == 2


def test_ranks_that_were_started_again_meet_whatever_the_earlier_ones_left(agent: TCPStore) -> None:
    for rank in (0, 1, 0):  # as if killed while they waited
        with pytest.raises(ConnectError, match="did not come"):
            meet(launched(rank, agent, world_size=3), timeout_seconds=0.1)
    assert len(met(agent, late_seconds=(0.3, 0, 0.1))) == 3


def test_a_rank_in_a_room_that_rank_0_has_left_follows_it_into_the_next(agent: TCPStore) -> None:
    with pytest.raises(ConnectError, match="rank 1 did not come"):
        meet(launched(0, agent), timeout_seconds=0.2)
    waiting = threading.Event()

    def early() -> Store:
        waiting.set()
        return meet(launched(1, agent), timeout_seconds=20)

    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(early)
        waiting.wait()
        sleep(0.2)  # it is in the room that rank 0 gave up
        meet(launched(0, agent), timeout_seconds=20)
        assert second.result(timeout=20) is not None


@pytest.mark.slow
def test_a_rank_that_comes_before_rank_0_has_left_waits_for_its_next_store(
    run_ranks_script: Callable,
) -> None:
    source = textwrap.dedent("""
        import os, time
        from drivetrain_state import StateSettings, connect, gather_object
        rank = int(os.environ["RANK"])
        for attempt in range(3):
            context = connect(StateSettings(device="cpu", watchdog=False, timeout_seconds=60))
            if rank == 0:
                time.sleep(0.3)
            print(gather_object(context, (attempt, rank)))
            if rank == attempt % 2:
                time.sleep(0.3)
            context.close()
    """)
    for done in run_ranks_script(source):
        assert done.stdout == "".join(f"[({n}, 0), ({n}, 1)]\n" for n in range(3)), done
        assert done.stderr == "", done


def test_two_processes_with_one_rank_are_told_before_they_wait(agent: TCPStore) -> None:
    child = subprocess.Popen(["sleep", "60"])
    meeting = PrefixStore("drivetrain_meeting", agent)
    try:
        meeting.set("entered/1/0", process_identity(child.pid))  # it came first
        with pytest.raises(ConnectError, match=f"process {child.pid} of this host came first as that rank"):
            meet(launched(0, agent), timeout_seconds=20)
    finally:
        child.kill()
        child.wait()
    with pytest.raises(ConnectError, match="rank 1 did not come"):  # one that was killed holds no rank
        meet(launched(0, agent), timeout_seconds=0.2)
