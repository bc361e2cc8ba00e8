"""Backends on the CPU of this process or rank, and the parts of a user's loop around them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from drivetrain_backends import (
    AccumulationWindow,
    Backend,
    DDPBackend,
    DDPSettings,
    FSDPBackend,
    FSDPSettings,
    Prepared,
    SingleBackend,
)
from drivetrain_backends.gradients.accumulation import OnNonfinite
from drivetrain_backends.modules.block_changes import BlockChanges
from drivetrain_backends.settings import ModelSettings
from drivetrain_backends.state_dict.full_tensors import full_tensor
from drivetrain_precision import PrecisionSettings, choose_policy
from drivetrain_state import Context, ParallelDims, StateSettings, connect

Module = TypeVar("Module", bound=nn.Module)
KINDS: dict[str, tuple[type[Backend], Any]] = {
    "single": (SingleBackend, None),
    "ddp": (DDPBackend, DDPSettings),
    "fsdp": (FSDPBackend, FSDPSettings),
}


def context(*, needs_group: bool = True, parallelism: ParallelDims | None = None, **settings: Any) -> Context:
    """Connect this process on the CPU."""
    section = StateSettings(device="cpu", watchdog=False, **settings)
    return connect(section, needs_group=needs_group, parallelism=parallelism)


def backend_of(
    kind: str,
    mode: str = "no",
    *,
    accumulation: int = 1,
    precision: PrecisionSettings | None = None,
    on_nonfinite: OnNonfinite = "warn",
    changes: ModelSettings | None = None,
    **settings: Any,
) -> Any:
    """Return a backend by its kind, with the settings of its section; `changes` are made in its models."""
    made, section = KINDS[kind]
    where = context(needs_group=kind != "single")
    window = AccumulationWindow(accumulation, on_nonfinite=on_nonfinite)
    policy = choose_policy(mode, where.device, precision)
    backend = made(where, policy, window=window, settings=None if section is None else section(**settings))
    return backend if changes is None else changing(backend, changes)


def changing(backend: Any, settings: ModelSettings) -> Any:
    """Make changes in the models that a backend prepares, as a run does."""
    prepare, changes = backend.prepare, BlockChanges(settings)

    def prepare_changed(models: Sequence[nn.Module], *others: Any) -> Any:
        changes.apply(models)
        return prepare(models, *others)

    backend.prepare = prepare_changed
    return backend


def single(mode: str = "no", **options: Any) -> SingleBackend:
    return backend_of("single", mode, **options)


def ddp(mode: str = "no", **options: Any) -> DDPBackend:
    return backend_of("ddp", mode, **options)


def fsdp(mode: str = "no", **options: Any) -> FSDPBackend:
    return backend_of("fsdp", mode, **options)


def prepare_sgd(backend: Any, model: Module, *, lr: float = 0.1) -> tuple[Any, Module, Any]:
    """Prepare a model with SGD over its parameters; return the backend, the model and what is prepared."""
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=lr)], [])
    return backend, model, prepared


def step_and_clear(prepared: Prepared) -> None:
    """Step a model's first optimizer, and clear its gradients."""
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()


def take_step(prepared: Prepared, loss: Tensor) -> None:
    """Train on a loss that is a window of its own."""
    prepared.backward(loss)
    step_and_clear(prepared)


def plain_step(optimizer: Optimizer, loss: Tensor) -> None:
    """Step on a loss as a plain loop does, and clear its gradients."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def held(backend: Backend, prepared: Sequence[Prepared]) -> Iterator[None]:
    """Keep the gradients of a micro-batch local unless it closes its window."""
    with ExitStack() as stack:
        for one in () if backend.window.closing else prepared:
            stack.enter_context(one.no_sync())
        yield


def weights(prepared: Prepared) -> dict[str, Tensor]:
    """Return a copy of a prepared model's full weights. Called on all ranks."""
    return {name: full_tensor(value).clone() for name, value in prepared.state_dict()["model"].items()}


def linear() -> nn.Linear:
    """Return a layer of two features and one output, always with the same weights."""

    torch.manual_seed(0)
    return nn.Linear(2, 1)


class Weight(nn.Module):
    """One weight w; maps x to w * x, so that the gradient of a loss is known by hand."""

    def __init__(self) -> None:
        super().__init__()

        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x
