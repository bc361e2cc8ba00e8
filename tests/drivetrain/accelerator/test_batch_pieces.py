"""Windows at the end of an epoch, for loops that train a batch in one micro-batch or in several."""

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from drivetrain_backends import AccumulationError
from plain_loop.accelerated import ON_TWO, accelerator_of

SAY = r"accelerator\.accumulate\(model, last=\.\.\.\)"
ROWS = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))


def loader_of(num_batches: int, size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(ROWS[: num_batches * size]), batch_size=size)


class Run:
    """A model in training, and the steps that it took."""

    def __init__(self, accumulation: int, *loaders: DataLoader[Any], backend: str = "usual") -> None:
        self.accelerator = accelerator_of(backend, gradient_accumulation_steps=accumulation)
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        self.start = copy.deepcopy(model)
        prepared = self.accelerator.prepare(model, SGD(model.parameters(), lr=0.1), *loaders)
        self.model, self.optimizer, self.loaders = prepared[0], prepared[1], prepared[2:]
        self.windows: list[list[Tensor]] = [[]]

    def train(self, x: Tensor, **said: Any) -> None:
        with self.accelerator.accumulate(self.model, **said):
            self.windows[-1].append(x)
            self.accelerator.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.windows.append([])

    @property
    def lengths(self) -> list[int]:
        return [len(window) for window in self.windows]


def windows_of(num_batches: int, num_pieces: int, accumulation: int) -> list[int]:
    """The micro-batches of each window of an epoch."""
    whole, rest = divmod(num_batches * num_pieces, accumulation)
    return [accumulation] * whole + [rest] * bool(rest)


@pytest.mark.parametrize("accumulation", [2, 3, 4, 8])
@pytest.mark.default_cases("3")
def test_a_window_closes_early_with_the_last_piece_of_the_last_batch(accumulation: int) -> None:
    for num_pieces, num_batches in product((1, 2, 4), (2, 3, 5)):
        run = Run(accumulation, loader_of(num_batches), loader_of(2))
        loader, evaluated = run.loaders
        for _ in range(2):
            for (x,) in loader:
                for piece in x.chunk(num_pieces):
                    run.train(piece)
                    if num_batches == 3:
                        assert len(list(evaluated)) == 2
        assert run.lengths == [*windows_of(num_batches, num_pieces, accumulation) * 2, 0]


def trained_as_a_plain_loop(backend: str) -> float:
    """How far the weights end from those of a loop without drivetrain, trained a batch a step."""
    size, epochs = 4, 2
    run = Run(size, loader_of(4, 8), backend=backend)
    (loader,) = run.loaders
    with run.accelerator as accelerator:
        plain = SGD(run.start.parameters(), lr=0.1)
        for _ in range(epochs):
            for (x,) in loader:
                for piece in x.split(2):
                    run.train(piece)
                    if accelerator.sync_gradients:
                        plain.zero_grad()
                        run.start(accelerator.gather(x)).square().mean().backward()
                        plain.step()
        weights = accelerator.get_state_dict(run.model, everywhere=True)
        apart = max(
            (weights[key] - value).abs().max().item() for key, value in run.start.state_dict().items()
        )
        assert run.lengths[-1] == 0
        return apart


@pytest.mark.parametrize(
    "backend",
    ["single", pytest.param("ddp", marks=ON_TWO), pytest.param("fsdp", marks=[ON_TWO, pytest.mark.slow])],
)
def test_batches_in_pieces_train_as_whole_ones(backend: str) -> None:
    assert trained_as_a_plain_loop(backend) < 1e-6


def train_in_pieces(run: Run, sizes: dict[int, int]) -> None:
    """Train an epoch, each batch in pieces of one size, or of another one for some."""
    for step, (x,) in enumerate(run.loaders[0]):
        for piece in x.split(sizes.get(step, sizes[-1])):
            run.train(piece)


def test_a_last_batch_of_more_or_fewer_pieces_is_refused() -> None:
    shorter = Run(4, DataLoader(TensorDataset(ROWS[:10]), batch_size=4))
    with pytest.raises(AccumulationError, match=rf"last batch had 2 micro-batches, .* before it 4: .*{SAY}"):
        train_in_pieces(shorter, {-1: 1})
    with pytest.raises(
        AccumulationError, match=rf"micro-batch 2 of a loader's last batch, .* with 1 .*{SAY}"
    ):
        train_in_pieces(Run(2, loader_of(3)), {-1: 4, 2: 2})
    with pytest.raises(AccumulationError, match=SAY):
        train_in_pieces(Run(2, loader_of(1)), {-1: 2})


def test_pieces_of_any_number_are_trained_where_the_loop_says_which_is_the_last() -> None:
    run = Run(4, DataLoader(TensorDataset(ROWS[:10]), batch_size=4))
    for _ in range(2):
        for (x,) in run.loaders[0]:
            for i in range(len(x)):
                run.train(x[i : i + 1], last=i + 1 == len(x))
    assert run.lengths == [4, 4, 2, 4, 4, 2, 0]


def test_a_window_that_is_full_with_the_last_batch_needs_no_word() -> None:
    run = Run(2, DataLoader(TensorDataset(ROWS[:10]), batch_size=4))
    for _ in range(2):
        for (x,) in run.loaders[0]:
            for piece in x.split(1):  # 4, 4 and 2
                run.train(piece)
    assert run.lengths == [2] * 10 + [0]


def in_turns(run: Run) -> Iterator[Tensor]:
    one, other = run.loaders
    batches = iter(other)
    for (x,) in one:
        yield x
        yield next(batches)[0]


def zipped(run: Run) -> Iterator[Tensor]:
    for (x,), (y,) in zip(*run.loaders, strict=False):
        yield x + y


def nested(run: Run) -> Iterator[Tensor]:
    one, other = run.loaders
    for (x,) in one:
        yield x
        for (y,) in other:
            yield y


@pytest.mark.parametrize(
    ("loop", "batches", "accumulation", "expected"),
    [
        (in_turns, (3, 3), 4, [4, 2]),
        (in_turns, (3, 4), 4, [4, 2]),
        (zipped, (3, 5), 2, [2, 1]),
        (zipped, (5, 3), 2, [2, 1]),
        (nested, (3, 3), 4, [4, 4, 4]),  # the epochs of an inner loader close windows too
        (nested, (2, 2), 4, [3, 3]),
    ],
)
@pytest.mark.default_cases("zipped-batches3-2-expected3", "nested-batches4-4-expected4")
def test_two_loaders_close_the_window_when_one_is_done_with(
    loop: Callable[[Run], Iterator[Tensor]], batches: tuple[int, int], accumulation: int, expected: list[int]
) -> None:
    run = Run(accumulation, *map(loader_of, batches))
    for _ in range(2):
        for x in loop(run):
            run.train(x)
    assert run.lengths == [*expected * 2, 0]


def test_a_loader_that_is_held_at_its_last_batch_is_done_with_once() -> None:
    run = Run(2, loader_of(3))
    batches = iter(run.loaders[0])
    for _ in range(3):
        run.train(next(batches)[0])
    assert run.lengths == [2, 1, 0]
    with pytest.raises(AccumulationError, match=SAY):
        run.train(torch.ones(2, 4))
    for _ in range(3):
        run.train(torch.ones(2, 4), last=False)
    assert run.lengths == [2, 1, 2, 1]


def test_a_batch_that_is_left_out_counts_for_nothing() -> None:
    run = Run(4, loader_of(5))
    for step, (x,) in enumerate(run.loaders[0]):
        if step == 3:
            continue
        for piece in x.chunk(2):
            run.train(piece)
    assert run.lengths == [4, 4, 0]
