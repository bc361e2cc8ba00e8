"""Probes: numbers measured by training on a few batches, after which the run is as it was before."""

import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from drivetrain.accelerator.accelerator import Accelerator
from drivetrain_backends import Prepared
from drivetrain_data import ShardedLoader
from drivetrain_state import barrier, broadcast_object, reduce

MeanLoss: TypeAlias = Callable[[nn.Module, Any], Tensor]

_SMOOTHING = 0.9  # the share of the running mean of losses that stays at each step
_DIVERGED = 4  # times the lowest loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """The losses of a learning-rate range test.

    Attributes:
        rates: The learning rates tried, rising.
        losses: The loss of each step before it, a running mean over steps and the mean over ranks.
    """

    rates: Sequence[float]
    losses: Sequence[float]

    @property
    def suggestion(self) -> float:
        """A tenth of the rate at which the loss is lowest: a start for the highest rate of a schedule.

        Raises:
            ValueError: The loss has fallen nowhere.
        """
        lowest = min(range(len(self.losses)), key=self.losses.__getitem__)
        if lowest == 0:
            raise ValueError(
                f"the loss falls at no rate from {self.rates[0]:.3g} to {self.rates[-1]:.3g}: begin lower, or look "
                "at the data"
            )
        return self.rates[lowest] / 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """The noise of a model's gradients, as arXiv:1812.06162 estimates it from two batch sizes.

    Attributes:
        gradient: The squared norm of the gradient without noise.
        noise: The trace of the covariance of one sample's gradient.
    """

    gradient: float
    noise: float

    @property
    def scale(self) -> float:
        """The batch size, in samples, up to which a larger batch saves steps; infinite where all is noise."""
        return self.noise / self.gradient if self.gradient > 0 else inf


def find_learning_rate(
    accelerator: Accelerator,
    model: nn.Module,
    loader: ShardedLoader[Any],
    *,
    loss: MeanLoss,
    lowest: float = 1e-7,
    highest: float = 1.0,
    num_steps: int = 100,
) -> LearningRates:
    """Train with a learning rate that rises at each step, and put everything back. Called on all ranks.

    Ends early where the loss has become four times the lowest, or is not finite. Rates of several groups keep their
    ratios. Schedulers do not step. The state is kept in a checkpoint below `project_dir`, or in a temporary folder;
    after an error, one process is put back, and several ranks are not.

    Args:
        accelerator: The Accelerator of the run.
        model: The prepared model, with its optimizers.
        loader: The prepared training loader, read from its current position, and again where it ends.
        loss: A function of the model and a batch that returns their mean loss, of shape ().
        lowest: The first rate, above 0.
        highest: The last rate, above `lowest`.
        num_steps: The number of optimizer steps, at least 2.

    Raises:
        TypeError: The loader is not prepared.
        ValueError: A number is out of range, the loader is empty, the first loss is not finite, no optimizer trains
            the model, a window is open, or ranks on several hosts share no `project_dir`.
    """
    _check_loader(loader)
    if not (0 < lowest < highest and num_steps > 1):
        raise ValueError(
            f"find_learning_rate(lowest={lowest!r}, highest={highest!r}, num_steps={num_steps!r}): the rates rise "
            "from above 0, in at least 2 steps"
        )
    rates, losses = list[float](), list[float]()
    with _state_restored(accelerator, model) as prepared:
        groups = [group for optimizer in prepared.optimizers for group in optimizer.param_groups]
        first = [float(group["lr"]) for group in groups]
        shares = [rate / max(first) if max(first) > 0 else 1.0 for rate in first]  # a warm-up begins at 0
        batches, running = _batches(loader), 0.0
        for step in range(num_steps):
            rate = lowest * (highest / lowest) ** (step / (num_steps - 1))
            for group, share in zip(groups, shares, strict=True):
                kept = group["lr"]
                group["lr"] = kept.new_tensor(rate * share) if isinstance(kept, Tensor) else rate * share
            running = _SMOOTHING * running + (1 - _SMOOTHING) * _step(accelerator, model, batches, loss)
            mean = running / (1 - _SMOOTHING ** (step + 1))
            if not isfinite(mean) or (losses and mean > _DIVERGED * abs(min(losses))):
                break
            rates.append(rate)
            losses.append(mean)
    if not losses:
        raise ValueError(
            "find_learning_rate: the loss of the first step is not finite; look at the data and the model"
        )
    return LearningRates(rates=rates, losses=losses)


def gradient_noise(
    accelerator: Accelerator,
    model: nn.Module,
    loader: ShardedLoader[Any],
    *,
    loss: MeanLoss,
    num_batches: int = 8,
) -> GradientNoise:
    """Estimate the noise of a model's gradients without a step, and put everything back. Called on all ranks.

    Compares the gradients of `num_batches` batches, each over all ranks, with the gradient of all of them: each batch
    is computed twice. One estimate is noisy itself: average `gradient` and `noise` of several, and then divide.

    Args:
        accelerator: The Accelerator of the run.
        model: The prepared model, with its optimizers.
        loader: The prepared training loader, with at least `num_batches` batches left.
        loss: A function of the model and a batch that returns their mean loss, of shape ().
        num_batches: The number of batches, at least 2.

    Raises:
        TypeError: The loader is not prepared.
        ValueError: The loader has too few whole batches, a gradient is not finite, no optimizer trains the model, or
            a window is open.
        AccumulationError: The backend's accumulation cannot be changed, as DeepSpeed's.
    """
    _check_loader(loader)
    before = accelerator.gradient_accumulation_steps
    accelerator.gradient_accumulation_steps = num_batches
    try:
        with _state_restored(accelerator, model) as prepared:
            size, batches = loader.total_batch_size, list[Any]()
            for batch in loader:
                if loader.current is not None and sum(loader.current.sizes or ()) == size:
                    batches.append(batch)
                if len(batches) == num_batches:
                    break
            if size is None or len(batches) < max(2, num_batches):
                raise ValueError(
                    f"gradient_noise(num_batches={num_batches!r}): needs as many whole batches, at least 2, of a "
                    f"known size on each rank, and the loader gave {len(batches)}"
                )
            small = [_squared_norm(accelerator, prepared, model, [batch], loss) for batch in batches]
            whole = _squared_norm(accelerator, prepared, model, batches, loss)
    finally:
        accelerator.gradient_accumulation_steps = before
    mean, number = sum(small) / len(small), len(small)
    if not isfinite(mean + whole):
        raise ValueError(
            "gradient_noise: a gradient holds an infinity or NaN; in fp16, train some steps before it, until the "
            "loss scale has settled; else look at the data and the model"
        )
    return GradientNoise(
        gradient=(number * whole - mean) / (number - 1),
        noise=(mean - whole) / (1 / size - 1 / (number * size)),
    )


@contextmanager
def _state_restored(accelerator: Accelerator, model: nn.Module) -> Generator[Prepared]:
    """Run the block on a prepared model whose schedulers stand still, and load the state from before it."""
    prepared = accelerator.prepared_of(model)
    if not prepared.optimizers or not accelerator.sync_gradients:
        raise ValueError(
            f"a probe of {type(prepared.unwrap()).__name__}: prepare it with its optimizer first, and probe between "
            "two windows of accumulation"
        )
    folder = _make_folder(accelerator)
    schedulers, window = list(prepared.schedulers), accelerator.window
    window.is_probe = True
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # some are in no checkpoint
    try:
        saved = accelerator.save_state(folder, background=False, at_once=True)
        prepared.schedulers.clear()
        is_done = False
        try:
            yield prepared
            is_done = True
        finally:
            prepared.schedulers.extend(schedulers)
            if is_done or accelerator.num_processes == 1:  # ranks that failed apart cannot load together
                window.reset()
                for optimizer in prepared.optimizers:
                    optimizer.zero_grad()
                accelerator.load_state(saved)
                with torch.no_grad():
                    for name, buffer in model.named_buffers():
                        buffer.copy_(buffers[name])
        barrier(accelerator.context)
    finally:
        window.is_probe = False
        if accelerator.is_main_process:
            rmtree(folder, ignore_errors=True)


def _make_folder(accelerator: Accelerator) -> Path:
    """Make a folder that all ranks reach."""
    project, context = accelerator.settings.project_dir, accelerator.context
    if project is None and context.topology.num_nodes > 1:
        raise ValueError(
            "the state before a probe is kept in a folder, and the hosts share none: give the Accelerator a "
            "project_dir that all of them reach"
        )
    made = None
    if context.topology.is_main:
        if project is not None:
            project.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix="drivetrain-probe-", dir=project)
    return Path(broadcast_object(context, made) or "")


def _check_loader(loader: object) -> None:
    if not isinstance(loader, ShardedLoader):
        raise TypeError(f"a loader of type {type(loader).__name__}: pass the one that prepare() returned")


def _batches(loader: ShardedLoader[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, again and again."""
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ValueError("the loader to probe with is empty: give one that has batches")


def _step(accelerator: Accelerator, model: nn.Module, batches: Iterator[Any], loss: MeanLoss) -> float:
    """Train until the optimizers step; return the mean loss over micro-batches and ranks."""
    losses = list[Tensor]()
    for batch in batches:
        losses.append(accelerator.train_step(batch, loss=loss, model=model).loss)
        if accelerator.sync_gradients:
            break
    return float(reduce(accelerator.context, torch.stack(losses).mean(), op="mean", over="reads"))


def _squared_norm(
    accelerator: Accelerator, prepared: Prepared, model: nn.Module, batches: Sequence[Any], loss: MeanLoss
) -> float:
    """Return the squared norm of the mean gradient of batches, which is dropped."""
    norm: Tensor | None = None
    for place, batch in enumerate(batches, start=1):
        with accelerator.accumulate(model, last=place == len(batches)):
            accelerator.backward(loss(model, batch), model=model)
            norm = accelerator.clip_grad_norm_(model.parameters(), inf)
    for optimizer in prepared.optimizers:
        optimizer.zero_grad()
    assert norm is not None
    return float(norm) ** 2
