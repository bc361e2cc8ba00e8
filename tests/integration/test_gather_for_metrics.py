"""Each sample once, in the dataset's order, whatever was computed from it."""

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


def gathered_nested(kind: str, length: int, even: str, dispatch: bool) -> list[int]:
    accelerator = Accelerator(cpu=True, data={"even": even, "dispatch": dispatch})
    loader = accelerator.prepare(loader_over(kind, length, 3))
    found: list[int] = []
    for batch in loader:
        output = Output(
            logits=batch[:, None].float() * torch.ones(2), extra={"label": batch, "mask": batch > 3}
        )
        whole = accelerator.gather_for_metrics(output)
        assert isinstance(whole, Output)
        assert whole.logits[:, 1].tolist() == whole.extra["label"].tolist()
        assert (whole.extra["label"] > 3).tolist() == whole.extra["mask"].tolist()
        found += whole.extra["label"].tolist()
    return found


@pytest.mark.parametrize("num_processes", [1, 2, 4])
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
    run_ranks, num_processes: int, length: int, kind: str, even: str, dispatch: bool
) -> None:
    for found in run_ranks(gathered_nested, kind, length, even, dispatch, num_processes=num_processes):
        assert found == list(range(length))


def mean_of_zero_dim_losses() -> list[float]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(9.0), batch_size=2))
    losses: list[float] = []
    for batch in loader:
        losses += accelerator.gather_for_metrics(batch.mean()).tolist()
    return losses


def test_a_rank_that_holds_only_padding_adds_no_value_of_shape_zero(run_ranks) -> None:
    # batches (0, 1) (2, 3) (4, 5) (6, 7), then the one sample 8, on rank 0 alone
    assert run_ranks(mean_of_zero_dim_losses, num_processes=4) == [[0.5, 2.5, 4.5, 6.5, 8.0]] * 4


def gathered_objects() -> list[str]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=2))
    found: list[str] = []
    for batch in loader:
        found += accelerator.gather_for_metrics([f"text {i}" for i in batch.tolist()], use_gather_object=True)
    return found


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_objects_come_once_and_in_order(run_ranks, num_processes: int) -> None:
    expected = [f"text {i}" for i in range(11)]
    assert run_ranks(gathered_objects, num_processes=num_processes) == [expected] * num_processes


def zipped() -> tuple[list[list[int]], str]:
    accelerator = Accelerator(cpu=True)
    one = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))
    other = accelerator.prepare(DataLoader(torch.arange(100, 107), batch_size=2))
    found: list[list[int]] = [[], []]
    message = ""
    for a, b in zip(one, other, strict=True):
        try:
            accelerator.gather_for_metrics(a)
        except RuntimeError as error:
            message = str(error)
        found[0] += accelerator.gather_for_metrics(a, loader=one).tolist()
        found[1] += accelerator.gather_for_metrics(b, loader=other).tolist()
    return found, message


def test_two_zipped_loaders_are_told_apart(run_ranks) -> None:
    for found, message in run_ranks(zipped):
        assert found == [list(range(8)), list(range(100, 107))]
        assert "loader=" in message


def zipped_of_unequal_tails() -> list[int]:
    accelerator = Accelerator(cpu=True)
    one = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))
    other = accelerator.prepare(DataLoader(torch.arange(100, 108), batch_size=2))
    # The second step holds 1 + 0 samples of one, and 2 + 2 of the other.
    return [int(sample) for a, _ in zip(one, other, strict=True) for sample in accelerator.gather(a)]


def test_a_plain_gather_of_two_zipped_loaders_keeps_every_row(run_ranks) -> None:
    assert run_ranks(zipped_of_unequal_tails) == [[0, 1, 2, 3, 4, 4]] * 2


def plain_gather_in_a_tail() -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(7)), batch_size=2))
    return [accelerator.gather(batch).tolist() for (batch,) in loader]


def test_a_plain_gather_of_an_uneven_tail_is_whole(run_ranks) -> None:
    assert run_ranks(plain_gather_in_a_tail) == [[[0, 1, 2, 3], [4, 5, 6]]] * 2


def gathered_after_the_loop(length: int) -> str:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=2))
    collected = torch.cat(list(loader))
    total = accelerator.gather_for_metrics(collected.sum())
    assert total.shape == (accelerator.num_processes,)
    assert sorted(set(accelerator.gather(collected).tolist())) == list(range(length))
    try:
        return str(accelerator.gather_for_metrics(collected).tolist())
    except TrimError as error:
        return str(error)


def test_what_was_collected_in_a_loop_with_a_tail_is_not_gathered_after_it(run_ranks) -> None:
    assert run_ranks(gathered_after_the_loop, 8) == ["[0, 1, 4, 5, 2, 3, 6, 7]"] * 2
    assert run_ranks(gathered_after_the_loop, 7) == ["[0, 1, 4, 5, 2, 3, 6]"] * 2
    for said in run_ranks(gathered_after_the_loop, 9):
        assert "only 1+0 samples of the ranks counted" in said


def gathered_padded_objects() -> list[Any]:
    accelerator = Accelerator(cpu=True, data={"even": "pad"})
    loader = accelerator.prepare(DataLoader(torch.arange(5), batch_size=4))
    (batch,) = loader
    texts = [str(int(sample)) for sample in batch]
    for _ in loader:
        return accelerator.gather_for_metrics({"text": texts, "both": (batch, texts)})
    return []


def test_padding_is_left_out_of_objects_of_any_structure(run_ranks) -> None:
    for first, second in run_ranks(gathered_padded_objects):
        assert first["text"] == ["0", "1", "2", "3"]
        assert second["text"] == ["4"]
        assert (second["both"][0].tolist(), second["both"][1]) == ([4], ["4"])


class Groups(Dataset[Tensor]):
    """Item i is a batch of i + 1 rows of its own."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((index + 1,), index)


def gathered_items(even: str) -> tuple[list[int], list[float]]:
    accelerator = Accelerator(cpu=True, data={"even": even})
    loader = accelerator.prepare(DataLoader(Groups(), batch_size=None))
    rows: list[int] = []
    numbers: list[float] = []
    for item in loader:
        found = accelerator.gather_for_metrics({"rows": item, "mean": item.float().mean()})
        rows += found["rows"].tolist()
        numbers += found["mean"].tolist()
    return rows, numbers


@pytest.mark.parametrize("even", ["uneven", "pad"])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.default_cases("4-uneven")
def test_items_that_are_batches_already_come_once(run_ranks, num_processes: int, even: str) -> None:
    expected = ([i for i in range(5) for _ in range(i + 1)], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert run_ranks(gathered_items, even, num_processes=num_processes) == [expected] * num_processes


def gathered_after_a_filter(even: str) -> list[int]:
    accelerator = Accelerator(cpu=True, data={"even": even})
    found: list[int] = []
    for batch in accelerator.prepare(DataLoader(torch.arange(15), batch_size=4)):
        found += accelerator.gather_for_metrics(batch[batch % 3 != 0]).tolist()
    return found


@pytest.mark.parametrize("num_processes", [2, 4])
def test_rows_that_a_rank_leaves_out_are_left_out(run_ranks, num_processes: int) -> None:
    expected = [number for number in range(15) if number % 3]
    assert (
        run_ranks(gathered_after_a_filter, "uneven", num_processes=num_processes)
        == [expected] * num_processes
    )


def filtered_with_padding() -> str:
    try:
        return str(gathered_after_a_filter("pad"))
    except TrimError as error:
        return str(error)


def test_rows_left_out_of_a_batch_with_padding_are_an_error_on_every_rank(run_ranks) -> None:
    for said in run_ranks(filtered_with_padding):
        assert "rank 1 gave 2 rows or elements for a batch of 4 samples, of which 3 count" in said


def gathered_of_unequal_widths() -> str:
    accelerator = Accelerator(cpu=True)
    try:
        for batch in accelerator.prepare(DataLoader(torch.arange(4), batch_size=2)):
            accelerator.gather_for_metrics({"logits": torch.zeros(len(batch), 3 + accelerator.process_index)})
    except CollectiveMismatchError as error:
        return str(error)
    return "nothing raised"


def test_unequal_sizes_beyond_the_first_are_named(run_ranks) -> None:
    for said in run_ranks(gathered_of_unequal_widths):
        assert "data['logits'] may differ between ranks, but it has rank 0: (2, 3); rank 1: (2, 4)" in said


class Scaled:
    """A loader of another library; a part of each batch is no row of a sample."""

    dataset = range(23)

    def __iter__(self):
        return ({"scale": torch.tensor([2.0]), "x": part} for part in torch.arange(23).split([8, 2, 3, 8, 2]))


def gathered_of_guessed_sizes(data: dict[str, Any]) -> tuple[list[int], list[int]]:
    accelerator = Accelerator(cpu=True, data=data)
    found: list[int] = []
    rows: list[int] = []
    for batch in accelerator.prepare(Scaled()):
        found += accelerator.gather_for_metrics({"rows": batch["x"], "scale": batch["scale"]})[
            "rows"
        ].tolist()
        rows.append(len(accelerator.gather(batch["x"])))
    return found, rows


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("even", ["uneven", "pad"])
@pytest.mark.default_cases("uneven-False")
def test_batches_that_do_not_say_their_sizes_are_gathered_exactly(
    run_ranks, even: str, dispatch: bool
) -> None:
    repeated = {"uneven": 2, "pad": 8}[even]
    for found, rows in run_ranks(gathered_of_guessed_sizes, {"even": even, "dispatch": dispatch}):
        assert found == list(range(23))
        assert rows == [10, 11, 2 + repeated]


def collected_in_an_inner_loop() -> tuple[str, list[int]]:
    accelerator = Accelerator(cpu=True)
    train = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))
    evaluation = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))
    message, last = "", []
    for step, batch in enumerate(train):
        if step == 0:
            collected = torch.cat(list(evaluation))
            try:
                accelerator.gather_for_metrics(collected)
            except TrimError as error:
                message = str(error)
            named = accelerator.gather_for_metrics(batch, loader=train)
            assert named.tolist() == [0, 1, 2, 3]
        last = accelerator.gather_for_metrics(batch).tolist() if step else last
    return message, last


def test_what_an_inner_loop_collected_is_not_trimmed_as_the_outer_ones_batch(run_ranks) -> None:
    for message, last in run_ranks(collected_in_an_inner_loop):
        assert "this comes after the loop: in its last step only 1+0 samples of the ranks counted" in message
        assert last == [4, 5, 6, 7]
