"""Loaders with `use_stateful_dataloader`: torchdata's class and state, beside torchdata's own loader."""

import pickle
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate_sides import OURS, THEIRS
from drivetrain_accelerate.loaders.batch_shards import BatchSamplerShard
from drivetrain_accelerate.loaders.prepared_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from drivetrain_data import DataStateError

pytest.importorskip("accelerate")
torchdata: Any = pytest.importorskip("torchdata.stateful_dataloader")
Stateful: Any = torchdata.StatefulDataLoader

# torchdata 0.11 calls what torch 2.15 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

NUMBERS: Any = list(range(14))
WORKERS = pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])


class Stream(IterableDataset[int]):
    """Numbers, without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS)


class StandingStream(Stream):
    """Numbers, with a state."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(NUMBERS):
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Counting(Dataset[torch.Tensor]):
    """Indices, with the number of samples that were read, which is its state."""

    num_read = 0

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        return torch.tensor([index, self.num_read])

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def prepared(dataset: Any, **options: Any) -> Any:
    return prepare_data_loader(DataLoader(dataset, **options), use_stateful_dataloader=True)


shard, dispatcher, skipping = (
    partial(kind, use_stateful_dataloader=True)
    for kind in (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader)
)


def read(loader: Any, keep: int | None = None) -> Any:
    """Return the batches of a loop; with `keep`, also the state behind that many of them."""
    found: list[Any] = []
    state: Any = None
    for batch in loader:
        found.append(torch.as_tensor(batch).tolist())
        if len(found) == keep:
            state = pickle.loads(pickle.dumps(loader.state_dict()))
    return found if keep is None else (found, state)


@WORKERS
@pytest.mark.parametrize("build", [shard, dispatcher, skipping])
def test_a_loader_of_a_program_is_torchdatas_with_its_states(build: Any, num_workers: int) -> None:
    def options() -> dict[str, Any]:
        return {"batch_size": 4, "num_workers": num_workers, "generator": torch.Generator().manual_seed(3)}

    plain, loader = Stateful(NUMBERS, **options()), build(NUMBERS, **options())
    assert isinstance(loader, Stateful)
    assert isinstance(loader, DataLoaderShard)
    assert loader.use_stateful_dataloader
    assert [loader.state_dict() for _ in loader] == [plain.state_dict() for _ in plain]
    assert loader.state_dict() == plain.state_dict()
    assert loader.state_dict()["_iterator_finished"]


@WORKERS
@pytest.mark.parametrize("dataset", [NUMBERS, Stream, StandingStream, Counting])
@pytest.mark.parametrize("build", [prepared, shard, dispatcher])
def test_states_go_between_a_loader_and_torchdatas(build: Any, dataset: Any, num_workers: int) -> None:
    def make(kind: Any) -> Any:
        data = dataset() if isinstance(dataset, type) else dataset
        return kind(data, batch_size=4, num_workers=num_workers)

    for giver, taker in ((build, Stateful), (Stateful, build), (build, build)):
        batches, state = read(make(giver), keep=2)
        loader = make(taker)
        loader.load_state_dict(state)
        # torchdata reads a stream to its end once more, where each worker has a state of its own.
        assert read(loader) == batches[2:], (giver, taker)
        if dataset is not Counting:
            assert read(loader) == batches
    loader, again = make(build), make(build)
    read(loader)
    again.load_state_dict(loader.state_dict())
    assert len(read(again)) == len(batches)


@pytest.mark.parametrize("dataset", [NUMBERS, Stream()])
def test_the_state_behind_a_skip_counts_what_was_skipped(dataset: Any) -> None:
    whole = read(Stateful(dataset, batch_size=4))
    for loader in (
        skipping(dataset, batch_size=4, skip_batches=2),
        skip_first_batches(shard(dataset, batch_size=4), 2),
        skip_first_batches(prepared(dataset, batch_size=4), 2),
    ):
        assert isinstance(loader, Stateful)
        batches, state = read(loader, keep=1)
        assert batches == whole[2:]
        assert state["_num_yielded"] == 3
        for taker in (Stateful(dataset, batch_size=4), skipping(dataset, batch_size=4, skip_batches=2)):
            taker.load_state_dict(state)
            assert read(taker) == whole[3:]


def test_a_state_holds_the_epoch_and_the_seed_of_a_shuffled_order() -> None:
    def build() -> Any:
        loader = prepared(NUMBERS, batch_size=4, shuffle=True)
        loader.set_epoch(3)
        return loader

    batches, state = read(build(), keep=1)
    torch.manual_seed(5)
    again = prepared(NUMBERS, batch_size=4, shuffle=True)
    again.load_state_dict(state)
    assert read(again) == batches[1:]
    assert sorted(chain.from_iterable(batches)) == NUMBERS


def test_a_loader_without_batches_and_one_with_a_batch_sampler_have_states() -> None:
    own = torch.utils.data.BatchSampler(NUMBERS, 3, drop_last=True)
    cases: tuple[dict[str, Any], ...] = (
        {"batch_size": None},
        {"batch_sampler": own},
        {"batch_size": 4, "drop_last": True},
    )
    for options in cases:
        batches, state = read(prepared(NUMBERS, **options), keep=3)
        assert batches == read(DataLoader(NUMBERS, **options))
        again = Stateful(NUMBERS, **options)
        again.load_state_dict(state)
        assert read(again) == batches[3:]


@pytest.mark.slow
def test_persistent_workers_keep_the_state_of_their_dataset() -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}
    loader = prepared(Counting(), **options)
    first, state = read(loader, keep=2)
    assert read(loader) != first  # the counts go on
    again = prepared(Counting(), **options)
    again.load_state_dict(state)
    assert read(again) == first[2:]


def test_a_checkpoint_of_a_run_goes_on_and_the_state_counts_on(tmp_path: Path) -> None:
    def run(accelerator: Any, *, load: bool) -> Any:
        _, loader = accelerator.prepare(
            torch.nn.Linear(1, 1), DataLoader(NUMBERS, batch_size=4, shuffle=True, num_workers=0)
        )
        assert isinstance(loader, Stateful)
        if load:
            accelerator.load_state(tmp_path)
        found: list[Any] = []
        for batch in loader:
            found.append((batch.tolist(), loader.state_dict()["_num_yielded"]))
            if len(found) == 1 and not load:
                accelerator.save_state(tmp_path)
        return found

    options = OURS("accelerate.utils.DataLoaderConfiguration")(use_stateful_dataloader=True)
    with OURS.accelerator(dataloader_config=options) as accelerator:
        whole = run(accelerator, load=False)
    with OURS.accelerator(dataloader_config=options) as accelerator:
        assert run(accelerator, load=True) == whole[1:]
    assert [count for _, count in whole] == [1, 2, 3, 4]


def states_on_a_rank() -> list[str]:
    """Return what went wrong on this rank with states of each kind of loader."""
    wrong: list[str] = []
    for dispatch, (name, dataset) in product((False, True), {"numbers": NUMBERS, "stream": Stream()}.items()):
        config: dict[str, Any] = {"use_stateful_dataloader": True, "dispatch_batches": dispatch}
        options = OURS("accelerate.utils.DataLoaderConfiguration")(**config)
        with OURS.accelerator(dataloader_config=options) as accelerator:
            plain = DataLoader(dataset, batch_size=2)
            batches, state = read(accelerator.prepare(plain), keep=2)
            again = accelerator.prepare(plain)
            again.load_state_dict(state)
            fresh = accelerator.prepare(plain)
            gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in fresh]
            num = len(batches) - (name == "stream")  # what fills a tail of a stream may differ
            checks = {
                "class": isinstance(again, Stateful),
                "resumed": read(again)[: num - 2] == batches[2:num],
                "gathered": list(chain.from_iterable(gathered)) == NUMBERS,
            }
            others: Any = {"batch_size": 2}
            rest = [NUMBERS[at : at + 2] for at in range(8, len(NUMBERS), 2)]
            if name == "numbers" and not dispatch:
                rank = accelerator.process_index
                others, rest = {"batch_sampler": BatchSamplerShard(plain.batch_sampler, 2, rank)}, batches[2:]  # pyright: ignore[reportArgumentType]
            taker = Stateful(dataset, **others)
            taker.load_state_dict(state)
            checks["taken"] = read(taker) == rest
            foreign = accelerator.prepare(plain)
            foreign.load_state_dict({key: value for key, value in state.items() if key != "sharded"})
            checks["without ours"] = read(foreign)[: num - 2] == batches[2:num]
            wrong += [f"{name} {dispatch}: {check}" for check, holds in checks.items() if not holds]
    return wrong


def test_states_of_several_processes(run_ranks: Any) -> None:
    assert run_ranks(states_on_a_rank) == [[], []]


def test_a_loader_that_the_program_builds_of_torchdatas_kind_is_read() -> None:
    for side in (THEIRS, OURS):
        with side.accelerator() as accelerator:
            loader = accelerator.prepare(Stateful(NUMBERS, batch_size=4))
            assert list(chain.from_iterable(read(loader))) == NUMBERS


def test_what_is_no_state_and_a_loader_that_reads_in_its_own_way_are_refused() -> None:
    loader = prepared(NUMBERS, batch_size=4)
    with pytest.raises(DataStateError, match=r"no state of torchdata's StatefulDataLoader: it has \['epoch'"):
        loader.load_state_dict({"epoch": 1})
    _, state = read(loader, keep=1)
    with pytest.raises(DataStateError, match="saved with num_workers=0 and this loader has 1"):
        prepared(NUMBERS, batch_size=4, num_workers=1).load_state_dict(state)
    with pytest.raises(ValueError, match="use_stateful_dataloader=True: Reversed reads in a way of its own"):
        prepare_data_loader(Reversed(NUMBERS), use_stateful_dataloader=True)


class Reversed(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def test_torchdata_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", None)
    said = r"use_stateful_dataloader=True: torchdata 0\.8 or newer is not"
    for build in (prepared, shard, dispatcher):
        with pytest.raises(ImportError, match=said):
            build(NUMBERS)
