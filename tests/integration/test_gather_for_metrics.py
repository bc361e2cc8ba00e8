"""Each sample once, in the dataset's order, whatever was computed from it."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain import Accelerator
from drivetrain_data import TrimError
from drivetrain_state import CollectiveMismatchError


@dataclass
class Output:
    logits: Tensor
    extra: dict[str, Tensor]


class Stream(IterableDataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(torch.arange(self.length))


def loader_over(kind: str, length: int, batch_size: int) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(length), batch_size=batch_size)
    return DataLoader(torch.arange(length), batch_size=batch_size)


RANKS = [pytest.param(number, marks=pytest.mark.ranks(number)) for number in (1, 2, 4)]


@pytest.mark.parametrize("num_processes", RANKS)
@pytest.mark.parametrize("length", [24, 25, 17, 3, 1])
@pytest.mark.parametrize(
    ("kind", "even", "dispatch"),
    [
        ("map", "uneven", False),
        ("map", "pad", False),
        ("stream", "uneven", False),
        ("stream", "uneven", True),
    ],
)
@pytest.mark.slow
def test_nested_outputs_come_once_and_in_order(
    num_processes: int, length: int, kind: str, even: str, dispatch: bool
) -> None:
    accelerator = Accelerator(cpu=True, data={"even": even, "dispatch": dispatch})
    found: list[int] = []
    for batch in accelerator.prepare(loader_over(kind, length, 3)):
        output = Output(
            logits=batch[:, None].float() * torch.ones(2), extra={"label": batch, "mask": batch > 3}
        )
        whole = accelerator.gather_for_metrics(output)
        assert isinstance(whole, Output)
        assert whole.logits[:, 1].tolist() == whole.extra["label"].tolist()
        assert (whole.extra["label"] > 3).tolist() == whole.extra["mask"].tolist()
        found += whole.extra["label"].tolist()
    assert found == list(range(length))


@pytest.mark.ranks(4)
def test_a_rank_that_holds_only_padding_adds_no_value_of_shape_zero() -> None:
    accelerator = Accelerator(cpu=True)
    losses: list[float] = []
    for batch in accelerator.prepare(DataLoader(torch.arange(9.0), batch_size=2)):
        losses += accelerator.gather_for_metrics(batch.mean()).tolist()
    # batches (0, 1) (2, 3) (4, 5) (6, 7), then the one sample 8, on rank 0 alone
    assert losses == [0.5, 2.5, 4.5, 6.5, 8.0]


@pytest.mark.parametrize("num_processes", RANKS)
def test_objects_come_once_and_in_order(num_processes: int) -> None:
    accelerator = Accelerator(cpu=True)
    found: list[str] = []
    for batch in accelerator.prepare(DataLoader(torch.arange(11), batch_size=2)):
        found += accelerator.gather_for_metrics([f"text {i}" for i in batch.tolist()], use_gather_object=True)
    assert found == [f"text {i}" for i in range(11)]


@pytest.mark.ranks(2)
def test_two_zipped_loaders_are_told_apart() -> None:
    accelerator = Accelerator(cpu=True)
    one = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))
    other = accelerator.prepare(DataLoader(torch.arange(100, 107), batch_size=2))
    found: list[list[int]] = [[], []]
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        with pytest.raises(RuntimeError, match="loader=") if step else nullcontext():  # of unequal tails
            accelerator.gather_for_metrics(a)
        found[0] += accelerator.gather_for_metrics(a, loader=one).tolist()
        found[1] += accelerator.gather_for_metrics(b, loader=other).tolist()
    assert found == [list(range(8)), list(range(100, 107))]


@pytest.mark.ranks(2)
def test_a_plain_gather_of_two_zipped_loaders_keeps_every_row() -> None:
    accelerator = Accelerator(cpu=True)
    one = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))
    other = accelerator.prepare(DataLoader(torch.arange(100, 108), batch_size=2))
    # The second step holds 1 + 0 samples of one, and 2 + 2 of the other.
    found = [int(sample) for a, _ in zip(one, other, strict=True) for sample in accelerator.gather(a)]
    assert found == [0, 1, 2, 3, 4, 4]


@pytest.mark.ranks(2)
def test_a_plain_gather_of_an_uneven_tail_is_whole() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(7)), batch_size=2))
    assert [accelerator.gather(batch).tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("length", "whole"), [(8, [0, 1, 4, 5, 2, 3, 6, 7]), (7, [0, 1, 4, 5, 2, 3, 6]), (9, None)]
)
def test_what_was_collected_in_a_loop_with_a_tail_is_not_gathered_after_it(
    length: int, whole: list | None
) -> None:
    accelerator = Accelerator(cpu=True)
    collected = torch.cat(list(accelerator.prepare(DataLoader(torch.arange(length), batch_size=2))))
    assert accelerator.gather_for_metrics(collected.sum()).shape == (2,)
    assert sorted(set(accelerator.gather(collected).tolist())) == list(range(length))
    if whole is not None:
        assert accelerator.gather_for_metrics(collected).tolist() == whole
        return
    with pytest.raises(TrimError, match=r"only 1\+0 samples of the ranks counted"):
        accelerator.gather_for_metrics(collected)


@pytest.mark.ranks(2)
def test_padding_is_left_out_of_objects_of_any_structure() -> None:
    accelerator = Accelerator(cpu=True, data={"even": "pad"})
    loader = accelerator.prepare(DataLoader(torch.arange(5), batch_size=4))
    (batch,) = loader
    texts = [str(int(sample)) for sample in batch]
    again = iter(loader)
    next(again)
    first, second = accelerator.gather_for_metrics({"text": texts, "both": (batch, texts)})
    assert first["text"] == ["0", "1", "2", "3"]
    assert second["text"] == ["4"]
    assert (second["both"][0].tolist(), second["both"][1]) == ([4], ["4"])


class Groups(Dataset[Tensor]):
    """Item i is a batch of i + 1 rows of its own."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((index + 1,), index)


@pytest.mark.parametrize("even", ["uneven", "pad"])
@pytest.mark.parametrize("num_processes", RANKS)
@pytest.mark.default_cases("4-uneven")
def test_items_that_are_batches_already_come_once(num_processes: int, even: str) -> None:
    accelerator = Accelerator(cpu=True, data={"even": even})
    rows: list[int] = []
    means: list[float] = []
    for item in accelerator.prepare(DataLoader(Groups(), batch_size=None)):
        found = accelerator.gather_for_metrics({"rows": item, "mean": item.float().mean()})
        rows += found["rows"].tolist()
        means += found["mean"].tolist()
    assert rows == [i for i in range(5) for _ in range(i + 1)]
    assert means == [0.0, 1.0, 2.0, 3.0, 4.0]


def gathered_after_a_filter(even: str) -> list[int]:
    accelerator = Accelerator(cpu=True, data={"even": even})
    found: list[int] = []
    for batch in accelerator.prepare(DataLoader(torch.arange(15), batch_size=4)):
        found += accelerator.gather_for_metrics(batch[batch % 3 != 0]).tolist()
    return found


@pytest.mark.parametrize("num_processes", RANKS[1:])
def test_rows_that_a_rank_leaves_out_are_left_out(num_processes: int) -> None:
    assert gathered_after_a_filter("uneven") == [number for number in range(15) if number % 3]


@pytest.mark.ranks(2)
def test_rows_left_out_of_a_batch_with_padding_are_an_error_on_every_rank() -> None:
    said = "rank 1 gave 2 rows or elements for a batch of 4 samples, of which 3 count"
    with pytest.raises(TrimError, match=said):
        gathered_after_a_filter("pad")


@pytest.mark.ranks(2)
def test_unequal_sizes_beyond_the_first_are_named() -> None:
    accelerator = Accelerator(cpu=True)
    batch = next(iter(accelerator.prepare(DataLoader(torch.arange(4), batch_size=2))))
    said = r"data\['logits'\] may differ between ranks, but it has rank 0: \(2, 3\); rank 1: \(2, 4\)"
    with pytest.raises(CollectiveMismatchError, match=said):
        accelerator.gather_for_metrics({"logits": torch.zeros(len(batch), 3 + accelerator.process_index)})


class Scaled:
    """A loader of another library; a part of each batch is no row of a sample."""

    dataset = range(23)

    def __iter__(self):
        return ({"scale": torch.tensor([2.0]), "x": part} for part in torch.arange(23).split([8, 2, 3, 8, 2]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("even", ["uneven", "pad"])
@pytest.mark.default_cases("uneven-False")
def test_batches_that_do_not_say_their_sizes_are_gathered_exactly(even: str, dispatch: bool) -> None:
    accelerator = Accelerator(cpu=True, data={"even": even, "dispatch": dispatch})
    found: list[int] = []
    rows: list[int] = []
    for batch in accelerator.prepare(Scaled()):
        found += accelerator.gather_for_metrics({"rows": batch["x"], "scale": batch["scale"]})[
            "rows"
        ].tolist()
        rows.append(len(accelerator.gather(batch["x"])))
    assert found == list(range(23))
    assert rows == [10, 11, 2 + {"uneven": 2, "pad": 8}[even]]


@pytest.mark.ranks(2)
def test_what_an_inner_loop_collected_is_not_trimmed_as_the_outer_ones_batch() -> None:
    accelerator = Accelerator(cpu=True)
    train = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))
    evaluation = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))
    first = iter(train)
    batch = next(first)
    collected = torch.cat(list(evaluation))
    said = r"this comes after the loop: in its last step only 1\+0 samples of the ranks counted"
    with pytest.raises(TrimError, match=said):
        accelerator.gather_for_metrics(collected)
    assert accelerator.gather_for_metrics(batch, loader=train).tolist() == [0, 1, 2, 3]
    assert accelerator.gather_for_metrics(next(first)).tolist() == [4, 5, 6, 7]
