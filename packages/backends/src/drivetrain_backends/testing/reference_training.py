"""The training of the contract, and its reference: a plain loop in one process, with torch alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from drivetrain_backends.settings import ModelSettings

NUM_FEATURES = 6
RATE, MOMENTUM = 0.1, 0.9
# Of the first layer: torch warns where it compiles what follows another layer.
changed = partial(ModelSettings, blocks=("first",))
_UNCHANGED = ModelSettings()
Window: TypeAlias = list[list[tuple[Tensor, Tensor]]]  # [micro-batch][rank] -> (x, y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The options of a training run that a check compares with the plain loop."""

    # The number of micro-batches of each accumulation window; a shorter one closes early.
    windows: Sequence[int]
    accumulation: int = 1  # the nominal number of micro-batches in a window
    # Whether losses are sums with a count, of sizes that differ by rank and micro-batch.
    counted: bool = False
    clip: float | None = None  # the norm to clip to, if any
    tied: bool = False  # whether the model's last layer shares its first layer's weight
    frozen: bool = False  # whether the model's first layer is frozen
    zero_first: bool = False  # whether `zero_grad` comes before backward, as in many loops
    changes: ModelSettings = _UNCHANGED  # what becomes of the model before it is prepared
    # The precision; in fp16 and bf16 the model is float32, and its weights approximate the plain loop's.
    mode: str = "no"
    # The class of both layers, which is built like nn.Linear, and like it maps (items, features) and has a `weight`.
    layer: Callable[..., nn.Module] = nn.Linear


class TinyModel(nn.Module):
    """Two layers with a nonlinearity between them; maps (items, features) to (items, features)."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = case.layer(NUM_FEATURES, NUM_FEATURES, dtype=dtype)
        self.last = case.layer(NUM_FEATURES, NUM_FEATURES, dtype=dtype)
        if case.tied:
            self.last.weight = self.first.weight
        if case.frozen:
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (items, features) to (items, features)."""
        return self.last(torch.tanh(self.first(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """The results of a step of the plain loop."""

    losses: list[list[Tensor]]  # the loss of each micro-batch of each rank, as [micro-batch][rank]
    norm: Tensor | None  # the norm of the gradients before clipping; None without clipping
    # The gradients that the optimizer used, by parameter name; clipped if `Case.clip` is set.
    gradients: dict[str, Tensor] = field(repr=False)
    weights: dict[str, Tensor] = field(repr=False)  # the model's state after the step


def tiny_model(case: Case, dtype: torch.dtype, *, seed: int) -> TinyModel:
    """Return the model of a case; equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyModel(case, dtype)


def make_optimizer(model: nn.Module) -> Optimizer:
    """Return SGD with momentum over the trainable parameters."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=MOMENTUM)


def make_adamw(model: nn.Module) -> Optimizer:
    """Return AdamW with two groups; biases are not decayed and learn faster."""
    weights = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    biases = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return AdamW([{"params": weights}, {"params": biases, "lr": 2 * RATE, "weight_decay": 0.0}], lr=RATE)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def make_windows(case: Case, num_ranks: int, dtype: torch.dtype) -> list[Window]:
    """Return the data of all ranks.

    For counted losses, batch sizes differ by rank and micro-batch, and some are zero. A rank of size zero gets a
    batch of one item, whose loss has a count of 0.
    """
    generator = torch.Generator().manual_seed(7)

    def batch(step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
        size = (3 * step + 5 * micro_batch + 7 * rank + 2) % 7 if case.counted else 4
        x, y = torch.randn(2, size or 1, NUM_FEATURES, generator=generator, dtype=dtype)
        return x, (y if size else torch.full_like(y, torch.nan))

    return [
        [[batch(step, i, rank) for rank in range(num_ranks)] for i in range(length)]
        for step, length in enumerate(case.windows)
    ]


def loss_and_count(case: Case, output: Tensor, target: Tensor) -> tuple[Tensor, int | None]:
    """Return the loss of a micro-batch: a mean and None; or, if `case.counted`, a sum and its number of samples.

    Samples with NaN targets are left out of the sum.
    """
    if not case.counted:
        return (output - target).square().sum(-1).mean(), None
    real = target.isfinite()
    target = torch.where(real, target, output.detach())
    return (output - target).square().sum(), int(real[:, 0].sum())


def train_plainly(case: Case, num_ranks: int, dtype: torch.dtype) -> list[PlainStep]:
    """Train on the micro-batches of all ranks at once and return every step."""
    model = tiny_model(case, dtype, seed=0)
    optimizer = make_optimizer(model)
    steps: list[PlainStep] = []
    for window in make_windows(case, num_ranks, dtype):
        found = [[loss_and_count(case, model(x), y) for x, y in by_rank] for by_rank in window]
        losses = torch.stack([loss for by_rank in found for loss, _ in by_rank])
        counts = [count for by_rank in found for _, count in by_rank if count is not None]
        loss = losses.sum() / (max(1, sum(counts)) if case.counted else len(losses))
        optimizer.zero_grad()
        loss.backward()
        norm = None if case.clip is None else nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        steps.append(
            PlainStep(
                losses=[[loss.detach() for loss, _ in by_rank] for by_rank in found],
                norm=norm,
                gradients={n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
                weights=weights_of(model),
            )
        )
    return steps


class UsedGradients:
    """The gradients that the optimizer of `make_optimizer` used, derived from the movements of the weights.

    The gradients of all backends are thus comparable, wherever a backend keeps its gradients.

    Args:
        weights: The weights before the first step.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights
        self._velocity = {name: torch.zeros_like(value) for name, value in weights.items()}

    def of_step(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the step that led to these weights."""
        velocity = {name: (self._weights[name] - value) / RATE for name, value in weights.items()}
        gradients = {name: value - MOMENTUM * self._velocity[name] for name, value in velocity.items()}
        self._weights, self._velocity = weights, velocity
        return gradients


def make_gan(case: Case, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return a generator to (items, features) and a discriminator to (items, 1), always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        generator = nn.Sequential(case.layer(NUM_FEATURES, NUM_FEATURES, dtype=dtype))
        return generator, nn.Sequential(nn.Tanh(), case.layer(NUM_FEATURES, 1, dtype=dtype))


def gan_batches(case: Case, num_ranks: int, dtype: torch.dtype) -> list[Window]:
    """Return noise and real items of all ranks, as [window][micro-batch][rank]."""
    generator = torch.Generator().manual_seed(11)

    def batch() -> tuple[Tensor, Tensor]:
        noise, real = torch.randn(2, 4, NUM_FEATURES, generator=generator, dtype=dtype)
        return noise, real

    return [[[batch() for _ in range(num_ranks)] for _ in range(length)] for length in case.windows]


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Return the least-squares loss, of shape (), with targets 1 for real and 0 for generated items."""
    return (real - 1).square().mean() + fake.square().mean()


def generator_loss(fake: Tensor) -> Tensor:
    """Return the least-squares loss, of shape (), with target 1 for generated items."""
    return (fake - 1).square().mean()


def train_gan_plainly(case: Case, num_ranks: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Train a generator and a discriminator in turns; return the weights of both after each window."""
    generator, discriminator = make_gan(case, dtype)
    optimizers = {model: make_optimizer(model) for model in (generator, discriminator)}
    weights: list[dict[str, Tensor]] = []
    for window in gan_batches(case, num_ranks, dtype):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        for by_rank in window:
            losses = [
                discriminator_loss(discriminator(real), discriminator(generator(noise).detach()))
                for noise, real in by_rank
            ]
            (torch.stack(losses).mean() / len(window)).backward()
            if by_rank is window[-1]:
                _clip_and_step(discriminator, optimizers[discriminator], case)
            discriminator.requires_grad_(False)
            losses = [generator_loss(discriminator(generator(noise))) for noise, _ in by_rank]
            (torch.stack(losses).mean() / len(window)).backward()
            discriminator.requires_grad_(True)
        _clip_and_step(generator, optimizers[generator], case)
        weights.append(named(g=weights_of(generator), d=weights_of(discriminator)))
    return weights


def _clip_and_step(model: nn.Module, optimizer: Optimizer, case: Case) -> None:
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()


def named(**states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the states of several models into one, prefixing names with the model's name."""
    return {f"{model}.{name}": value for model, state in states.items() for name, value in state.items()}
