import random
import threading
import time

import pytest
from torch.distributed import HashStore

from drivetrain_checkpoint import OtherRankFailedError
from drivetrain_checkpoint.saving.stop_step import AgreedStep
from drivetrain_state import Topology


def test_one_process_agrees_with_itself_at_once() -> None:
    alone = AgreedStep(None, topology=Topology(), patience_seconds=1)
    assert alone.reached(1) == []
    alone.ask("SIGTERM")
    alone.ask("SIGTERM")
    alone.ask("minutes")
    assert alone.reached(2) == ["SIGTERM", "minutes"]
    assert alone.reached(3) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.default_cases("1")
def test_all_ranks_reach_the_same_step_however_far_apart_they_are(seed: int) -> None:
    chance = random.Random(seed)
    world_size, rounds = 3, 2
    store = HashStore()
    agreed = [
        AgreedStep(store, topology=Topology(rank=rank, world_size=world_size), patience_seconds=20)
        for rank in range(world_size)
    ]
    decided: list[list[tuple[int, list[str]]]] = [[] for _ in range(world_size)]
    pauses = [[chance.uniform(0, 0.004) for _ in range(1000)] for _ in range(world_size)]

    def train(rank: int) -> None:
        step = 0
        while len(decided[rank]) < rounds:
            step += 1
            time.sleep(pauses[rank][step % 1000])
            if reasons := agreed[rank].reached(step):
                decided[rank].append((step, reasons))

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    agreed[2].ask("SIGTERM")
    while not all(decided):
        time.sleep(0.01)
    agreed[0].ask("minutes")
    agreed[1].ask("SIGUSR1")
    for thread in threads:
        thread.join(timeout=30)
    assert decided[0] == decided[1] == decided[2]
    (first, reasons), (second, _) = decided[0]
    assert reasons == ["SIGTERM"]
    assert second > first
    for one in agreed:
        one.close()


def test_a_rank_that_never_answers_is_an_error() -> None:
    agreed = AgreedStep(HashStore(), topology=Topology(world_size=2), patience_seconds=0.2)
    agreed.ask("SIGTERM")

    def train() -> None:
        for step in range(1000):
            time.sleep(0.01)
            agreed.reached(step)

    with pytest.raises(OtherRankFailedError, match=r"did not agree on a step to save at within 0\.2 s"):
        train()
    agreed.close()


def test_nobody_is_held_by_a_rank_that_has_taken_its_last_step() -> None:
    store = HashStore()
    main, other = (
        AgreedStep(store, topology=Topology(rank=rank, world_size=2), patience_seconds=60)
        for rank in range(2)
    )
    other.ask("SIGTERM")
    begun = time.monotonic()
    main.reached(1)
    other.reached(1)
    main.close()
    for step in range(2, 60):
        time.sleep(0.01)
        assert other.reached(step) == []
    assert time.monotonic() - begun < 30
    other.close()
