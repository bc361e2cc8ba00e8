"""Rows of the table "Where it differs" that need two ranks: all of them in one call of the ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate_sides import SIDES, Side, said
from processes import RankPool

pytest.importorskip("accelerate")

Numbers = dict[str, Any]


TWELVE: Any = range(12)


@pytest.fixture(scope="module")
def by_rank(
    rank_pools: dict[int, RankPool], pythons: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Numbers]]:
    """Return what each rank found, by side and row."""
    folder = tmp_path_factory.mktemp("of_one_process")
    for side in SIDES:
        save_alone(side, str(folder / side.name))
    pool = rank_pools.setdefault(2, RankPool(2, pythons=pythons))
    found: Any = pool.call(on_each_side, str(folder), timeout_seconds=90)
    return found


@pytest.fixture
def on_first(by_rank: list[dict[str, Numbers]]) -> dict[str, Numbers]:
    return by_rank[0]


def save_alone(side: Side, folder: str) -> None:
    """Save a run on one process, after two batches of two."""
    numbers: Any = range(12)
    with side.accelerator() as accelerator:
        _, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(numbers, batch_size=2))
        for number, _ in enumerate(loader, start=1):
            if number == 2:
                accelerator.save_state(folder)
                break


def on_each_side(folder: str) -> dict[str, Numbers]:
    found: dict[str, Numbers] = {}
    for side in SIDES:
        with side.accelerator() as accelerator:
            found[side.name] = {
                **of_loaders(accelerator),
                **of_tails(side, accelerator),
                **of_workers(accelerator),
                **of_training(accelerator),
                **of_collectives(side, accelerator.process_index),
                "absent": said(lambda: accelerator.on_process(lambda: "ran", process_index=5)()),
                "drawn": said(lambda: of_own_data(accelerator)),
                "arrays": of_arrays(accelerator, lambda rows: rows),
                "nested": of_arrays(accelerator, lambda rows: {"rows": rows, "none": None}),
            }
        with side.accelerator() as accelerator:
            _, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(TWELVE, batch_size=2))
            accelerator.load_state(f"{folder}/{side.name}")
            found[side.name]["resumed"] = [batch.tolist() for batch in loader]
        for row, evaluates_first in (("again", False), ("evaluated", True)):
            with side.accelerator() as accelerator:
                found[side.name][row] = stepped_weight(accelerator, evaluates_first=evaluates_first)
    return found


def stepped_weight(accelerator: Any, *, evaluates_first: bool) -> float:
    """Return a weight after a step whose gradient is minus the number of the rank.

    The model evaluates before it, or the gradient of another loss of the forward, -1, is added.
    """
    given = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(given.weight)
    if evaluates_first:
        accelerator.prepare_model(given, evaluation_mode=True)
        accelerator.free_memory()
    model, optimizer = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=1.0))
    output = model(torch.ones(1, 1)).sum()
    if not evaluates_first:
        accelerator.backward(-output, retain_graph=True)
    accelerator.backward(-output * accelerator.process_index)
    optimizer.step()
    return given.weight.item()


def of_loaders(accelerator: Any) -> Numbers:
    rank = accelerator.process_index
    torch.manual_seed(0)
    tail: list[Any] = []
    numbers: Any = range(11)
    shuffled = accelerator.prepare(DataLoader(numbers, batch_size=2, shuffle=True))
    joined: list[Any] = []
    plain = accelerator.prepare(DataLoader(numbers, batch_size=4))
    for even_batches in (False, None):
        with accelerator.join_uneven_inputs([], even_batches=even_batches):
            joined.append([sample for batch in plain for sample in batch.tolist()])
    order = [accelerator.gather_for_metrics(batch).tolist() for batch in shuffled]
    for batch in accelerator.prepare(DataLoader(numbers, batch_size=4)):
        means = torch.full((4,), float(rank + 1))  # a row for each sample of a full batch
        gathered = accelerator.gather_for_metrics(means).tolist()
        tail = [batch.tolist(), accelerator.gather_for_metrics(batch).tolist(), gathered]
    return {"tail": tail, "order": order, "joined": joined}


class SharedOut(IterableDataset[int]):
    """The numbers 0 to 11, of which each worker reads its part."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield from range(12) if worker is None else range(worker.id, 12, worker.num_workers)


def of_workers(accelerator: Any) -> Numbers:
    """Return what a rank reads of a stream that two workers read, and what is gathered of it."""
    read: list[list[int]] = []
    gathered: list[int] = []
    for batch in accelerator.prepare(DataLoader(SharedOut(), batch_size=2, num_workers=2)):
        read.append(batch.tolist())
        gathered += accelerator.gather_for_metrics(batch).tolist()
    return {"by workers": read, "gathered of workers": sorted(gathered)}


def of_own_data(accelerator: Any) -> list[int]:
    """Return what a rank reads where each has drawn samples of its own."""
    own: Any = [100 * accelerator.process_index + number for number in range(4)]
    return [sample for batch in accelerator.prepare(DataLoader(own)) for sample in batch.tolist()]


def of_arrays(accelerator: Any, form: Any) -> list[Any]:
    numbers: Any = range(10)
    loader = accelerator.prepare(DataLoader(numbers, batch_size=4))
    return [accelerator.gather_for_metrics(form(batch.numpy())) for batch in loader]


def of_tails(side: Side, accelerator: Any) -> Numbers:
    """Return what a rank reads of nine samples: uneven, and by the main process; and the scalars it gathers."""
    nine: Any = range(9)
    uneven, dispatched = (
        side("accelerate.data_loader.prepare_data_loader")(DataLoader(nine, batch_size=2), **options)
        for options in ({"even_batches": False}, {"dispatch_batches": True, "put_on_device": True})
    )
    scalars: list[Any] = []
    for _ in accelerator.prepare(DataLoader(nine, batch_size=2)):
        scalars = accelerator.gather_for_metrics(torch.tensor(float(accelerator.process_index))).tolist()
    return {
        "uneven": [batch.tolist() for batch in uneven],
        "dispatched": [batch.tolist() for batch in dispatched],
        "scalars": scalars,
        "split": [
            batch.tolist()
            for batch in side("accelerate.data_loader.prepare_data_loader")(
                DataLoader(nine, batch_size=4), split_batches=True
            )
        ],
    }


def of_training(accelerator: Any) -> Numbers:
    rank = accelerator.process_index
    given = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(given.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(given, optimizer, scheduler)
    with accelerator.no_sync(model):
        loss = model(torch.tensor([[float(rank + 1)]])).sum()
    triggered = said(lambda: gradient_of_triggered(accelerator, model, loss))
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    return {"triggered": triggered, "rate": scheduler.get_last_lr()}


def gradient_of_triggered(accelerator: Any, model: nn.Module, loss: torch.Tensor) -> float:
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    return accelerator.unwrap_model(model).weight.grad.item()


def of_collectives(side: Side, rank: int) -> Numbers:
    reduce, pad = side("accelerate.utils.reduce"), side("accelerate.utils.pad_across_processes")
    gather, gather_object = side("accelerate.utils.gather"), side("accelerate.utils.gather_object")
    own = torch.tensor([rank + 1.0])
    unlike = own if rank else own.int()
    flags = torch.ones(rank + 1, dtype=torch.bool)
    return {
        "unlike": said(lambda: gather(unlike).tolist()),
        **{
            word: said(lambda word=word: reduce(own, word).tolist()) for word in ("max", "min", "none", "odd")
        },
        "flags": said(lambda: str(pad(flags).dtype)),
        "filled": said(lambda: pad(flags, pad_index=-1).tolist()),
        "dict": said(lambda: gather_object({"a": rank, "b": rank})),
        "word": said(lambda: gather_object("ab")),
    }


def values(by_rank: list[dict[str, Numbers]], row: str) -> Iterator[list[Any]]:
    """Return what each side found for a row on both ranks."""
    return ([found[side.name][row] for found in by_rank] for side in SIDES)


@pytest.mark.slow
def test_scheduler(on_first: dict[str, Numbers]) -> None:
    """a scheduler's step"""
    assert {found["rate"][0] for found in on_first.values()} == {0.25}


def test_even_batches(by_rank: list[dict[str, Numbers]]) -> None:
    """`even_batches`"""
    for found in values(by_rank, "tail"):
        batches, gathered, _ = zip(*found, strict=True)
        assert batches == ([8, 9, 10, 0], [1, 2, 3, 4])
        assert gathered == ([8, 9, 10],) * 2


def test_rows_of_a_full_batch(on_first: dict[str, Numbers]) -> None:
    """`gather_for_metrics` with a row for each sample of a full batch"""
    theirs, ours, restored = (on_first[side.name]["tail"][-1] for side in SIDES)
    assert theirs == restored == [1.0, 1.0, 1.0]
    assert sorted(ours) == [1.0, 1.0, 1.0]


def test_order(by_rank: list[dict[str, Numbers]]) -> None:
    """the order of shuffled data"""
    alone: dict[str, list[Any]] = {
        side.name: [order_alone(side, draws) for draws in (0, 3)] for side in SIDES
    }
    assert alone["theirs"][0] != alone["theirs"][1]  # the generator has moved on
    assert sorted(alone["ours"][0]) == list(range(11))
    on_two = [index for step in by_rank[0]["ours"]["order"] for index in step]
    assert alone["ours"] == [on_two, on_two] == alone["restored"]


def order_alone(side: Side, num_draws: int) -> list[int]:
    """Return the order on one process, of a program that draws numbers before its loop."""
    torch.manual_seed(0)
    numbers: Any = range(11)
    with side.accelerator() as accelerator:
        loader = accelerator.prepare(DataLoader(numbers, batch_size=4, shuffle=True))
        torch.rand(num_draws)
        return [index for batch in loader for index in batch.tolist()]


def test_trigger(by_rank: list[dict[str, Numbers]]) -> None:
    """`trigger_sync_in_backward`"""
    theirs, ours, restored = values(by_rank, "triggered")
    assert theirs == [1.5, 1.5]
    assert ours == restored
    assert all("outside no_sync()" in each for each in ours)


def test_unlike_tensors(by_rank: list[dict[str, Numbers]]) -> None:
    """collectives of tensors whose sizes or dtypes differ between ranks"""
    theirs, ours, restored = values(by_rank, "unlike")
    assert theirs[0] == [1, 1073741824]  # the bytes of a float, read as an integer
    assert ours == restored
    assert all("rank 0: gather" in each and "int32 (1,)" in each and "float32 (1,)" in each for each in ours)


def test_reduce(on_first: dict[str, Numbers]) -> None:
    """`reduce(reduction="min")`, or another word than "mean", "sum" and "max" """
    words = ("max", "min", "none", "odd")
    theirs, ours, restored = ([on_first[side.name][word] for word in words] for side in SIDES)
    assert theirs == restored == [[2.0], [3.0], [3.0], [3.0]]
    assert ours[:3] == [[2.0], [1.0], [1.0]]
    assert "reduction='odd': say one of" in ours[3]


def test_booleans(by_rank: list[dict[str, Numbers]]) -> None:
    """`pad_across_processes` of booleans"""
    theirs, ours, restored = values(by_rank, "flags")
    assert theirs == restored == ["torch.int64", "torch.bool"]
    assert ours == ["torch.bool", "torch.bool"]
    theirs, ours, restored = values(by_rank, "filled")
    assert theirs == restored == [[1, -1], [True, True]]
    assert ours == [[True, True], [True, True]]


def test_objects(on_first: dict[str, Numbers]) -> None:
    """`gather_object` of a dict or string on several processes"""
    theirs, ours, restored = ([on_first[side.name][row] for row in ("dict", "word")] for side in SIDES)
    assert theirs == restored == [["a", "b", "a", "b"]] * 2
    assert all("give it a list" in each for each in ours)


def test_joined(by_rank: list[dict[str, Numbers]]) -> None:
    """`join_uneven_inputs(even_batches=False)` on CPUs"""
    theirs, ours, restored = values(by_rank, "joined")
    assert [len(each) for each in theirs[0]] == [8, 8]
    assert ours == restored
    assert sorted(ours[0][0] + ours[1][0]) == list(range(11))
    assert [each[1] for each in ours] == [each[1] for each in theirs]


def test_uneven(by_rank: list[dict[str, Numbers]]) -> None:
    """`even_batches=False` with a tail for some of the ranks"""
    theirs, ours, restored = values(by_rank, "uneven")
    assert theirs == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert ours == restored
    assert [each[:2] for each in ours] == [each[:2] for each in theirs]
    assert [len(each) for each in ours] == [3, 3]


def test_dispatched_tail(by_rank: list[dict[str, Numbers]]) -> None:
    """a tail that the main process reads for all"""
    theirs, ours, restored = values(by_rank, "dispatched")
    assert [each[-1] for each in theirs] == [[8], [0]]
    assert ours == restored
    assert [len(each[-1]) for each in ours] == [2, 2]
    assert ours[0][-1][0] == 8


def test_workers_of_a_stream(by_rank: list[dict[str, Numbers]]) -> None:
    """a stream that several workers of the main process read for all"""
    theirs, ours, restored = values(by_rank, "by workers")
    assert theirs == [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]]
    assert ours == restored
    assert [each[:2] for each in ours] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    assert [len(each) for each in ours] == [4, 4]
    theirs, ours, _ = values(by_rank, "gathered of workers")
    assert theirs == ours == [list(range(12))] * 2


def test_split(by_rank: list[dict[str, Numbers]]) -> None:
    """`split_batches` of a loader"""
    theirs, ours, restored = values(by_rank, "split")
    assert theirs == ours == restored == [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]


def test_gathered_scalars(on_first: dict[str, Numbers]) -> None:
    """`gather_for_metrics` of a scalar of each rank with an epoch's last batch"""
    theirs, ours, restored = (on_first[side.name]["scalars"] for side in SIDES)
    assert theirs == restored == [0.0]
    assert ours == [0.0, 1.0]


def test_resume_at_another_number(by_rank: list[dict[str, Numbers]]) -> None:
    """`load_state` on another number of processes"""
    theirs, ours, restored = values(by_rank, "resumed")
    assert theirs == restored == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    assert ours == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]]


def test_unseen_backwards(by_rank: list[dict[str, Numbers]]) -> None:
    """a second `backward` of one forward on several processes, with `retain_graph`"""
    theirs, ours, restored = values(by_rank, "again")
    assert theirs == [1.0, 2.0]
    assert ours == restored == [1.5, 1.5]


def test_training_after_evaluation(by_rank: list[dict[str, Numbers]]) -> None:
    """`prepare` of a model after `prepare_model(evaluation_mode=True)` and `free_memory`, on several processes"""
    theirs, ours, restored = values(by_rank, "evaluated")
    assert theirs == [0.0, 1.0]
    assert ours == restored == [0.5, 0.5]


def test_absent_rank(on_first: dict[str, Numbers]) -> None:
    """`on_process` of a rank that is not there, on several processes"""
    assert on_first["theirs"]["absent"] is None
    assert on_first["ours"]["absent"] == on_first["restored"]["absent"]
    assert "index=5 with world_size=2: name a rank that exists" in on_first["ours"]["absent"]


def test_data_drawn_apart(by_rank: list[dict[str, Numbers]]) -> None:
    """a dataset that each process draws for itself, without a common seed"""
    assert [found["theirs"]["drawn"] for found in by_rank] == [[0, 2], [101, 103]]
    for found in by_rank:
        for side in ("ours", "restored"):
            assert "gives other samples on rank 1" in found[side]["drawn"]
            assert "draw random data with the same seed on every rank" in found[side]["drawn"]


def test_arrays(by_rank: list[dict[str, Numbers]]) -> None:
    """`gather_for_metrics` of NumPy arrays"""
    for found in by_rank:
        assert found["theirs"]["arrays"] == found["restored"]["arrays"] == [list(range(8)), [8, 9]]
        assert found["theirs"]["nested"] == [["rows", "none"] * 2, ["rows", "none"]]
        assert [each.tolist() for each in found["ours"]["arrays"]] == [list(range(8)), [8, 9]]
        nested = [(each["rows"].tolist(), each["none"]) for each in found["ours"]["nested"]]
        assert nested == [(list(range(8)), None), ([8, 9], None)]
