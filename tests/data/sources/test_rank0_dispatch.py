import threading
from collections import UserDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from data.reading import resumed, samples_of, shard_over_ranks
from drivetrain_data import DispatchError, Shard, shard_loader, skip_first_batches, trim


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any], fails_at: int | None = None) -> None:
        self.samples = samples
        self.fails_at = fails_at

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(self.samples):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            yield sample


def dispatched(loader: Any, **options: Any) -> Any:
    return shard_over_ranks(loader, dispatch=True, **options)


def as_it_is(batch: Any) -> Any:
    return batch


def read_numbers(kind: str, length: int, even: str, ahead: bool) -> tuple[list[int], list[Any], list[Any]]:
    data = Stream(list(range(length))) if kind == "stream" else torch.arange(length)
    loader = dispatched(DataLoader(data, batch_size=2), even=even, read_ahead=ahead)
    read: list[int] = []
    plans: list[Any] = []
    states: list[Any] = []
    for _ in range(2):
        read.clear()
        for batch in loader:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, batch)
            plan = loader.current
            assert tuple(map(len, gathered)) == plan.sizes
            assert plan.replayed == (plan.real_counts[dist.get_rank()] == 0 and even != "pad")
            read += trim(plan, torch.cat(gathered)).tolist()
            plans.append((plan.real_counts, plan.is_last))
            states.append(loader.state_dict())
    return read, plans, states


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("kind", ["stream", "map"])
@pytest.mark.parametrize("length", [0, 1, 8, 19])
@pytest.mark.parametrize(("even", "ahead"), [("uneven", False), ("uneven", True), ("pad", False)])
@pytest.mark.default_cases(
    "uneven-True-19-map-4", "pad-False-8-stream-2", "uneven-False-1-stream-4", "pad-False-0-map-2"
)
def test_one_rank_reads_and_all_get_their_part(run_ranks, num_processes, kind, length, even, ahead) -> None:
    results = run_ranks(read_numbers, kind, length, even, ahead, num_processes=num_processes)
    read, plans, states = results[0]
    assert read == list(range(length))
    assert [is_last for _, is_last in plans[: len(plans) // 2]].count(True) == min(1, length)
    assert all(other[1:] == (plans, states) for other in results)


def place_of_messages() -> str:
    return dispatched(DataLoader(range(4))).order_source.partition(" through ")[2]


def test_ranks_of_one_machine_share_memory(run_ranks) -> None:
    assert run_ranks(place_of_messages) == ["shared memory"] * 2


def steps_of_several_batches_each() -> list[list[int]]:
    buckets = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    loader = dispatched(DataLoader(torch.arange(9), batch_sampler=buckets))
    assert len(loader) == 3
    return [batch.tolist() for batch in loader]


def test_batches_of_a_batch_sampler_are_dispatched_whole(run_ranks) -> None:
    assert run_ranks(steps_of_several_batches_each) == [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6], [7, 8]]]


def mixed_structures() -> list[Any]:
    samples: list[Any] = []
    for number in range(40):
        size = 1 + (number // 4) % 5 * 300  # grows and shrinks, past what the message before took
        samples.append(
            {"x": torch.full((size,), number), "name": f"sample {number}" * (number % 7), "n": number}
        )

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        same = len({len(sample["x"]) for sample in batch}) == 1
        x = torch.stack([sample["x"] for sample in batch]) if same else [sample["x"] for sample in batch]
        return {"x": x, "names": [sample["name"] for sample in batch], "ids": tuple(s["n"] for s in batch)}

    loader = dispatched(DataLoader(Stream(samples), batch_size=2, collate_fn=collate))
    found: list[Any] = []
    for batch in loader:
        for number, x, name in zip(batch["ids"], batch["x"], batch["names"], strict=True):
            assert torch.equal(x, samples[number]["x"])
            assert name == samples[number]["name"]
        assert isinstance(batch["ids"], tuple)
        found.append(batch["ids"])
    return found


@pytest.mark.parametrize("num_processes", [2, 4])
def test_variable_shapes_strings_and_nesting_arrive_as_they_are(run_ranks, num_processes: int) -> None:
    results = run_ranks(mixed_structures, num_processes=num_processes)
    dealt = [ids for step in zip(*results, strict=True) for ids in step]
    assert dealt == [(2 * i, 2 * i + 1) for i in range(20)]


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class OtherPair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Tagged(UserDict[str, Any]):
    tag = 0


def structures_that_look_alike() -> int:
    values = [torch.tensor(1), torch.tensor(2)]
    tagged = [Tagged(x=values[0]) for _ in range(2)]
    tagged[1].tag = 7
    batches: list[Any] = [
        {"a": values[0], "b": values[1]},
        {"b": values[1], "a": values[0]},
        Pair(*values),
        OtherPair(*values),
        tuple(values),
        values,
        *tagged,
        torch.ones(2, requires_grad=True),
        torch.ones(2),
    ]
    samples = [batch for batch in batches for _ in range(2)]  # one for each rank
    loader = dispatched(DataLoader(Stream(samples), batch_size=None, collate_fn=as_it_is))

    def shown(batch: Any) -> str:
        return f"{type(batch).__name__} {batch} {getattr(batch, 'tag', '')}"

    assert [shown(batch) for batch in loader] == [shown(batch) for batch in batches]
    return len(batches)


def test_structures_that_look_alike_arrive_as_they_are(run_ranks) -> None:
    assert run_ranks(structures_that_look_alike) == [10, 10]


def batches_that_cannot_be_sent() -> str:
    samples = [1, 2, 3, threading.Lock()]
    loader = dispatched(DataLoader(Stream(samples), batch_size=None, collate_fn=as_it_is))
    try:
        list(loader)
    except (TypeError, DispatchError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_cannot_be_sent_is_an_error_on_every_rank(run_ranks) -> None:
    reader, receiver = run_ranks(batches_that_cannot_be_sent)
    assert reader.startswith("TypeError: cannot pickle")
    assert receiver.startswith("DispatchError: the rank that reads for all failed")
    assert "cannot pickle '_thread.lock' object" in receiver


def a_shard_without_a_rank(own_counts: bool) -> str:
    rank = dist.get_rank()
    shard = Shard(rank, 2 + rank if own_counts else 3)
    try:
        shard_loader(DataLoader(torch.arange(9)), shard, dispatch=True, group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("own_counts", [False, True])
def test_every_shard_needs_a_rank_of_the_group(run_ranks, own_counts: bool) -> None:
    held = "0 of 2, 1 of 3" if own_counts else "0 of 3, 1 of 3"
    assert all(
        f"the group's ranks hold the shards {held}," in message
        for message in run_ranks(a_shard_without_a_rank, own_counts)
    )


class Alternating(IterableDataset[Any]):
    """Even steps have one shape, odd ones another; in the next epoch it is the other way round."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for step in range(6):
            for rank in range(2):
                yield torch.full((2 + (step + self.epoch) % 2,), float(10 * step + rank))


def left_before_another_layout(ahead: bool) -> int:
    loader = dispatched(DataLoader(Alternating(), batch_size=1), read_ahead=ahead)
    for epoch in range(3):
        for step, batch in enumerate(loader):
            expected = torch.full((1, 2 + (step + epoch) % 2), float(10 * step + dist.get_rank()))
            assert torch.equal(batch, expected), (epoch, step, batch)
            if epoch < 2 and step == epoch:
                break
    return step


@pytest.mark.parametrize("ahead", [False, True])
def test_a_layout_that_was_sent_ahead_and_left_is_not_taken_for_known(run_ranks, ahead: bool) -> None:
    assert run_ranks(left_before_another_layout, ahead) == [5, 5]


class Marked(torch.Tensor):
    pass


def subclasses_and_nested() -> list[str]:
    samples = [torch.ones(2).as_subclass(Marked), torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])]
    data = Stream([sample for sample in samples for _ in range(2)])
    loader = dispatched(DataLoader(data, batch_size=None, collate_fn=as_it_is))
    return [f"{type(batch).__name__} {batch.is_nested}" for batch in loader]


def test_tensors_of_other_kinds_arrive_as_they_are(run_ranks) -> None:
    assert run_ranks(subclasses_and_nested) == [["Marked False", "Tensor True"]] * 2


def fails_on_the_reader(fails_at: int, ahead: bool) -> tuple[int, str, str]:
    loader = dispatched(DataLoader(Stream(list(range(12)), fails_at), batch_size=2), read_ahead=ahead)
    received = 0
    try:
        for batch in loader:
            received += len(batch)
    except (OSError, DispatchError) as error:
        return received, type(error).__name__, str(error)
    return received, "", ""


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fails_at", [0, 1, 9])
def test_a_readers_error_reaches_every_rank(run_ranks, fails_at: int, ahead: bool) -> None:
    (received, reader, _), *others = run_ranks(fails_on_the_reader, fails_at, ahead, num_processes=4)
    assert reader == "OSError"
    for number, kind, message in others:
        assert number == received
        assert kind == "DispatchError"
        assert "OSError: the disk is gone" in message
        assert "the rank that reads for all failed" in message


def left_in_the_middle(ahead: bool) -> list[Any]:
    loader = dispatched(DataLoader(Stream(list(range(400))), batch_size=2), read_ahead=ahead)
    found: list[Any] = []
    for stop in (3, 1, None):
        seen: list[int] = []
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            total = torch.ones(1)
            dist.all_reduce(total)  # the loop's own collectives stay in step
            if number + 1 == stop:
                break
        found.append((seen[:2], len(seen), loader.state_dict()["position"], int(total)))
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loop_that_is_left_leaves_the_ranks_in_step(run_ranks, ahead: bool) -> None:
    assert run_ranks(left_in_the_middle, ahead) == [
        [([0, 1], 6, 12, 2), ([0, 1], 2, 4, 2), ([0, 1], 200, 0, 2)],
        [([2, 3], 6, 12, 2), ([2, 3], 2, 4, 2), ([2, 3], 200, 0, 2)],
    ]


def resumed_and_skipped(workers: int) -> tuple[list[int], list[int]]:
    def loader() -> Any:
        return dispatched(DataLoader(torch.arange(30), batch_size=2, shuffle=True, num_workers=workers))

    part = loader()
    first = samples_of(part, 3)
    return first + samples_of(resumed(loader(), part)), samples_of(skip_first_batches(loader(), 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dispatched_loader_goes_on_and_skips(run_ranks, workers: int) -> None:
    results = run_ranks(resumed_and_skipped, workers)
    assert sorted(results[0][0] + results[1][0]) == list(range(30))
    assert len(results[0][1]) + len(results[1][1]) == 22


def shared_streams_of_workers(num_epochs: int) -> tuple[list[int], Any]:
    class Shared(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = torch.utils.data.get_worker_info()
            return iter(range(info.id, 41, info.num_workers))

    def loader() -> Any:
        return dispatched(DataLoader(Shared(), batch_size=2, num_workers=2))

    part = loader()
    for _ in range(num_epochs):
        list(part)
    seen: list[int] = []
    for batch in islice(part, 5):
        seen += batch[: part.current.real_counts[dist.get_rank()]].tolist()
    rest = resumed(loader(), part)
    for batch in rest:
        seen += batch[: rest.current.real_counts[dist.get_rank()]].tolist()
    return seen, part.state_dict()


@pytest.mark.parametrize("num_epochs", [0, 1])
def test_every_rank_knows_where_each_worker_stands(run_ranks, num_epochs: int) -> None:
    (one, state), (other, same) = run_ranks(shared_streams_of_workers, num_epochs)
    assert state == same
    assert sum(state["extra"]["received"]) == state["position"] == 20
    assert sorted(one + other) == list(range(41))


def the_same_batch_for_ranks_of_one_shard() -> list[list[int]]:
    # two ranks that are one shard, as in tensor parallelism
    data = DataLoader(Stream(list(range(5))), batch_size=2)
    return [batch.tolist() for batch in shard_loader(data, Shard(0, 1), group=dist.group.WORLD)]


def test_ranks_of_one_shard_get_the_same_batches(run_ranks) -> None:
    assert run_ranks(the_same_batch_for_ranks_of_one_shard) == [[[0, 1], [2, 3], [4]]] * 2


def kept_batches(reverse: bool, ahead: bool) -> list[tuple[int, list[Any]]]:
    rank, count = dist.get_rank(), dist.get_world_size()

    class Reusing(IterableDataset[Any]):
        """A stream of samples as large as a message, which reuse the memory of those of the step before."""

        def __iter__(self) -> Iterator[Any]:
            memory = [(torch.empty(90_000), np.empty(3, dtype=np.float32)) for _ in range(count)]
            for number in range(23):
                row, array = memory[number % count]
                row.fill_(number)
                array.fill(-number)
                yield {
                    "label": number,
                    "array": array,
                    "pair": (row, row.double()[:5]),
                    "name": f"it is {number}",
                }

    loader = shard_loader(
        DataLoader(Reusing(), batch_size=1),
        Shard(count - 1 - rank if reverse else rank, count),
        dispatch=True,
        group=dist.group.WORLD,
        read_ahead=ahead,
    )
    kept: list[Any] = []
    for _ in range(3):  # so that every slot is used again
        kept += [(batch, loader.current.replayed) for batch in loader]
    # A later batch does not write over an earlier one that the program still holds.
    found: list[Any] = []
    for batch, replayed in kept:
        values = [part.unique().tolist() for part in (batch["array"], *batch["pair"])]
        found += [] if replayed else [(batch["label"].item(), [*values, *batch["name"]])]
    return found


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize(("reverse", "ahead"), [(False, False), (True, True)])
@pytest.mark.default_cases("False-False-3")
def test_batches_of_a_stream_that_reuses_its_memory_arrive_whole_and_stay(
    run_ranks, num_processes: int, reverse: bool, ahead: bool
) -> None:
    results = run_ranks(kept_batches, reverse, ahead, num_processes=num_processes)
    found = [seen for of_rank in results for seen in of_rank]
    expected = [(n, [[-n], [n], [n], f"it is {n}"]) for n in range(23)] * 3
    assert sorted(found) == sorted(expected)


def received_before_more_is_read(folder: str) -> int:
    received = Path(folder) / "received"

    class Gated(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.zeros(4, 90_000)
            until = monotonic() + 30
            while not received.exists():
                if monotonic() > until:
                    raise TimeoutError("the first step was not received while the third was not read")
                sleep(0.01)
            yield from torch.zeros(2, 90_000)

    num_received = 0
    for _ in dispatched(DataLoader(Gated(), batch_size=1)):
        num_received += 1
        if dist.get_rank() == 1:
            received.touch()
    return num_received


def test_a_large_batch_is_sent_before_more_is_read(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(received_before_more_is_read, str(tmp_path)) == [3, 3]


def left_at_different_steps(leaves_early: int, ahead: bool) -> str:
    samples = [torch.zeros(100_000)] * 40  # so large that no two steps share a message
    loader = dispatched(DataLoader(Stream(samples), batch_size=2), read_ahead=ahead)
    try:
        for number, _ in enumerate(loader):
            if number == (2 if dist.get_rank() == leaves_early else 4):
                break
        for _ in loader:
            break
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("leaves_early", [0, 1])
def test_a_loop_that_ranks_leave_at_different_steps_is_an_error(
    run_ranks, leaves_early: int, ahead: bool
) -> None:
    reader, receiver = run_ranks(left_at_different_steps, leaves_early, ahead)
    assert not reader or "has ended" in reader  # if it was not done before
    assert "all ranks must leave a loop at the same step" in receiver
