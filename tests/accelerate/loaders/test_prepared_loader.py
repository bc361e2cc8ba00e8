"""Prepared loaders, beside the installed Accelerate's and with `strict=False`."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from accelerate_sides import OURS, RESTORED, SIDES, THEIRS, Side
from drivetrain_accelerate.loaders.prepared_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    prepare_data_loader,
    skip_first_batches,
)

real: Any = pytest.importorskip("accelerate.data_loader")

# size and split_batches, drop_last, batches to skip, dispatch_batches
GRID = tuple(product(((10, False), (8, True)), (False, True), (0, 1), (None, True, False)))


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return self.size


def read(side: Side, dataset: Any, case: tuple[Any, ...]) -> Any:
    """Return what a program sees of a loader: its class, and of each batch its remainder, end and gathered rows."""
    (_, split), drop_last, skip, dispatch = case
    options = side("accelerate.utils.DataLoaderConfiguration")(split_batches=split, dispatch_batches=dispatch)
    with side.accelerator(dataloader_config=options) as accelerator:
        loader = accelerator.prepare(DataLoader(dataset, batch_size=4, drop_last=drop_last))
        if skip:
            loader = accelerator.skip_first_batches(loader, skip)
        state = accelerator.gradient_state
        return type(loader).__name__, [
            (state.remainder, state.end_of_dataloader, accelerator.gather_for_metrics(batch).tolist())
            for batch in loader
        ]


@pytest.mark.parametrize("kind", [range, Stream, StreamWithLength])
@pytest.mark.slow
def test_the_place_of_a_loop_and_the_gathered_rows_are_the_real_ones(kind: Any) -> None:
    for case in GRID:
        (size, _), drop_last, skip, dispatch = case
        theirs, ours, restored = (read(side, kind(size), case) for side in SIDES)
        assert ours == restored, case
        if kind is StreamWithLength and drop_last and skip and dispatch is False:
            # The real one cuts the last batch, which is full.
            assert ours[1] == [(-1, True, [4, 5, 6, 7])]
        else:
            assert ours == theirs, case


def test_a_loop_that_is_broken_off_does_not_count() -> None:
    for side in SIDES:
        with side.accelerator() as accelerator:
            loader = accelerator.prepare(DataLoader(range(4)))  # pyright: ignore[reportArgumentType]
            counts: list[int] = []
            for stops in (True, True, False, True):
                for _ in loader:
                    if stops:
                        break
                counts.append(loader.iteration)
            assert counts == [0, 0, 1, 1], side.name


def test_the_attributes_that_programs_read_are_the_real_ones() -> None:
    names = ("device", "rng_types", "skip_batches", "synchronized_generator", "use_stateful_dataloader")
    found: list[Any] = []
    for side in (THEIRS, OURS):
        with side.accelerator() as accelerator:
            loader = accelerator.prepare(DataLoader(range(4), shuffle=True))  # pyright: ignore[reportArgumentType]
            assert loader.gradient_state.sync_gradients
            found.append([getattr(loader, name) for name in names])
    assert found[0] == found[1]
    with OURS.accelerator() as accelerator:
        loader = accelerator.prepare(DataLoader(range(4)))  # pyright: ignore[reportArgumentType]
        assert accelerator.skip_first_batches(loader, 3).skip_batches == 3
        with pytest.raises(ValueError, match="slice_fn="):
            OURS("accelerate.data_loader.DataLoaderDispatcher")(range(4), slice_fn=len)


def own_dispatchers() -> dict[str, Any]:
    """Return what this rank reads by dispatchers that a program constructs itself, on each side."""
    found: dict[str, Any] = {}
    for side in SIDES:
        with side.accelerator() as accelerator:
            kind = side("accelerate.data_loader.DataLoaderDispatcher")
            dataset = range(11) if accelerator.is_main_process else range(99, 110)
            for split, drop_last in product((False, True), repeat=2):
                loader = kind(dataset, split_batches=split, _drop_last=drop_last, batch_size=4)
                found[f"{side.name} {split} {drop_last}"] = [
                    (batch.tolist(), accelerator.gather_for_metrics(batch).tolist()) for batch in loader
                ]
    return found


def test_a_dispatcher_of_a_program_hands_each_rank_its_slice(run_ranks: Any) -> None:
    for rank, found in enumerate(run_ranks(own_dispatchers)):
        for split, drop_last in product((False, True), repeat=2):
            theirs, ours, restored = (found[f"{side.name} {split} {drop_last}"] for side in SIDES)
            assert ours == restored
            own = 2 if split else 4
            assert [len(each) for each, _ in ours] == [own] * len(ours)
            assert ours[0] == (list(range(rank * own, rank * own + own)), list(range(2 * own)))
            # The real one fills a tail up to a multiple of the ranks, or cuts it; what is gathered is the same.
            num_full = 2 if split else 1
            assert ours[:num_full] == theirs[:num_full]
            assert drop_last or [each for _, each in ours] == [each for _, each in theirs]
            assert len(ours) == num_full + (not drop_last)


def test_a_batch_sampler_that_drops_its_tail_leaves_no_remainder() -> None:
    numbers = range(10)
    batches = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(numbers), 4, drop_last=True)
    with RESTORED.accelerator() as accelerator:
        loader = accelerator.prepare(DataLoader(numbers, batch_sampler=batches))  # pyright: ignore[reportArgumentType]
        gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    assert gathered == [[0, 1, 2, 3], [4, 5, 6, 7]]  # the real one cuts the last


class Told:
    """What is told the epoch, as a sampler may be."""

    def __init__(self) -> None:
        self.told = [0]

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


def order_of(epoch: int) -> list[int]:
    return torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()


class Buckets(Told, torch.utils.data.BatchSampler):
    """Batches of two of eight samples, in an order of their own for each epoch that they are told."""

    def __iter__(self) -> Iterator[list[int]]:
        order = order_of(self.told[-1])
        return iter([order[at : at + 2] for at in range(0, 8, 2)])

    def __len__(self) -> int:
        return 4


class ByEpoch(Buckets):
    """The same with the attributes of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.drop_last = 2, False
        self.sampler: Any = Told()


@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize("constructs", [False, True])
def test_the_epoch_is_told_to_samplers_at_once_and_kept_by_a_skip(constructs: bool, dispatch: Any) -> None:
    # Their dispatcher does not tell a batch sampler.
    for side in (THEIRS, OURS) if dispatch is None else (OURS,):
        options = side("accelerate.utils.DataLoaderConfiguration")(dispatch_batches=dispatch)
        with side.accelerator(dataloader_config=options) as accelerator:
            batches = ByEpoch()
            kind = side("accelerate.data_loader.DataLoaderShard") if constructs else DataLoader
            numbers: Any = list(range(8))
            loader = accelerator.prepare(kind(numbers, batch_sampler=batches))
            loader.set_epoch(3)
            assert (batches.told, batches.sampler.told) == ([0, 3], [0, 3]), side.name
            rest = accelerator.skip_first_batches(loader, 1)
            assert rest.iteration == 3, side.name
            assert torch.cat(list(rest)).tolist() == order_of(3)[2:], side.name
            assert (rest.iteration, accelerator.skip_first_batches(rest, 1).iteration) == (4, 4), side.name


NAMES = ("batch_size", "drop_last", "num_workers", "total_dataset_length")
OF_BATCHES = ["num_processes", "process_index", "split_batches", "even_batches", "skip_batches", "batch_size"]


def shown(loader: Any) -> Any:
    """Return the attributes of a loader that programs read, its batches of indices and their attributes."""
    found: dict[str, Any] = {name: getattr(loader, name) for name in NAMES if hasattr(loader, name)}
    chain: list[str] = []
    batches = loader.batch_sampler
    listed = [] if isinstance(loader.dataset, IterableDataset) else list(batches)
    while batches is not None:
        told = {name: getattr(batches, name, None) for name in OF_BATCHES}
        chain.append(f"{type(batches).__name__} {told}")
        batches = getattr(batches, "batch_sampler", None)
    return found, type(loader.sampler).__name__, listed, chain


def loaders() -> dict[str, Any]:
    numbers: Any = list(range(8))
    return {
        "batches": DataLoader(numbers, batch_size=4),
        "dropped": DataLoader(numbers, batch_size=4, drop_last=True, num_workers=1),
        "sampler": DataLoader(numbers, batch_size=2, sampler=torch.utils.data.SequentialSampler(numbers)),
        "own": DataLoader(numbers, batch_sampler=Buckets()),
        "stream": DataLoader(StreamWithLength(8), batch_size=4),
    }


def shown_on_a_rank() -> dict[str, Any]:
    """Return what each kind of loader shows on this rank, on each side."""
    found: dict[str, Any] = {}
    for side, split, dispatch in product((THEIRS, OURS), (False, True), (None, True)):
        options = side("accelerate.utils.DataLoaderConfiguration")(
            split_batches=split, dispatch_batches=dispatch
        )
        with side.accelerator(dataloader_config=options) as accelerator:
            for name, loader in loaders().items():
                if name == "own" and split:
                    continue  # an error on both
                prepared = accelerator.prepare(loader)
                case = f"{side.name} {name} {split} {dispatch}"
                found[case] = shown(prepared)
                found[f"{case} skip"] = shown(accelerator.skip_first_batches(prepared, 1))
    return found


@pytest.mark.slow
def test_a_loader_shows_the_batches_of_its_process_as_the_real_one(run_ranks: Any) -> None:
    for found in (shown_on_a_rank(), *run_ranks(shown_on_a_rank)):
        for case, theirs in found.items():
            if case.startswith(THEIRS.name):
                assert found[case.replace(THEIRS.name, OURS.name, 1)] == theirs, case


def shown_in_a_block() -> list[bool]:
    with OURS.accelerator() as accelerator:
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        loader = accelerator.prepare(DataLoader(list(range(7)), batch_size=2))  # pyright: ignore[reportArgumentType]
        found = [loader.batch_sampler.even_batches]
        with accelerator.join_uneven_inputs([model], even_batches=False):
            found.append(loader.batch_sampler.even_batches)
        return [*found, loader.batch_sampler.even_batches]


def test_the_batches_show_how_tails_are_treated_in_a_block(run_ranks: Any) -> None:
    assert run_ranks(shown_in_a_block) == [[True, False, True]] * 2


def sizes_read(
    prepare: Any, size: int, batch_size: int, *, drop_last: bool, **options: Any
) -> list[list[int]]:
    loader = DataLoader(range(size), batch_size, drop_last=drop_last)  # pyright: ignore[reportArgumentType]
    prepared = prepare(loader, **options)
    found = [batch.tolist() for batch in prepared]
    if prepare is prepare_data_loader:  # theirs tells a wrong length for split batches that are not even
        assert len(prepared) == len(found)
    return found


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_a_process_reads_what_it_reads_with_the_real_one(
    size: int, batch_size: int, processes: int, drop_last: bool, split: bool, even: bool
) -> None:
    batch_size = batch_size * processes if split else batch_size
    options: dict[str, Any] = {"num_processes": processes, "split_batches": split, "even_batches": even}
    mine, theirs = (
        [
            sizes_read(prepare, size, batch_size, drop_last=drop_last, process_index=process, **options)
            for process in range(processes)
        ]
        for prepare in (prepare_data_loader, real.prepare_data_loader)
    )
    if even or drop_last:
        assert mine == theirs
        return
    # Their processes have unequal numbers of batches, at which a collective hangs; ours repeat one sample.
    assert len({len(batches) for batches in mine}) == 1
    assert {index for batches in mine for batch in batches for index in batch} == set(range(size))
    num_full = size // (batch_size if split else batch_size * processes)
    assert [batches[:num_full] for batches in mine] == [batches[:num_full] for batches in theirs]


def test_batches_go_to_the_device_only_if_that_is_asked_for() -> None:
    loader = DataLoader(torch.ones(4, 1), 2)  # pyright: ignore[reportArgumentType]
    stays = prepare_data_loader(loader, torch.device("meta"), 1, 0)
    goes = prepare_data_loader(loader, torch.device("meta"), 1, 0, put_on_device=True)
    assert [next(iter(each)).device.type for each in (stays, goes)] == ["cpu", "meta"]


def test_a_prepared_loader_comes_back_as_it_is() -> None:
    prepared = prepare_data_loader(DataLoader(range(4)), num_processes=1, process_index=0)  # pyright: ignore[reportArgumentType]
    assert isinstance(prepared, DataLoaderShard)
    assert prepare_data_loader(prepared) is prepared
    with pytest.raises(ValueError, match="slice_fn_for_dispatch"):
        prepare_data_loader(DataLoader(range(4)), slice_fn_for_dispatch=len)  # pyright: ignore[reportArgumentType]


def dispatched() -> tuple[list[list[int]], list[list[int]]]:
    loader = DataLoader(range(10), 2, shuffle=True)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(torch.initial_seed() % 7)
    read_by_main = prepare_data_loader(loader, dispatch_batches=True)
    assert isinstance(read_by_main, DataLoaderDispatcher)
    by_each = prepare_data_loader(loader)
    return [batch.tolist() for batch in read_by_main], [batch.tolist() for batch in by_each]


def test_two_processes_share_the_data_and_the_seed(run_ranks: Any) -> None:
    first, second = run_ranks(dispatched)
    for mine, other in zip(first, second, strict=True):
        assert sorted({index for batch in [*mine, *other] for index in batch}) == list(range(10))
        assert len(mine) == len(other) == 3


def test_batches_have_the_labels_of_the_next_position_where_a_loop_divides_sequences() -> None:
    rows: Any = [{"labels": torch.tensor([index, 7, 8])} for index in range(3)]
    loader = DataLoaderShard(rows, batch_size=1)
    assert "shift_labels" not in next(iter(loader))
    loader.adds_shift_labels = True
    for first in (0, 1):
        found = list(skip_first_batches(loader, first))
        assert [each["shift_labels"].tolist() for each in found] == [[[7, 8, -100]]] * (3 - first)
        assert [each["labels"][0, 0] for each in found] == list(range(first, 3))
