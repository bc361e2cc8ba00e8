"""A DDP backend on the CPU of this rank, a model prepared with SGD, and a step as a loop takes it."""

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from drivetrain_backends import AccumulationWindow, DDPBackend, DDPSettings, Prepared
from drivetrain_backends.gradients.accumulation import NonFiniteGradients
from drivetrain_precision import PrecisionSettings, choose_policy
from drivetrain_state import StateSettings, connect

Module = TypeVar("Module", bound=nn.Module)


def ddp_backend(
    mode: str = "no",
    *,
    accumulation: int = 1,
    precision: PrecisionSettings | None = None,
    nonfinite_gradients: NonFiniteGradients = "ignore",
    **settings: object,
) -> DDPBackend:
    context = connect(StateSettings(device="cpu", watchdog=False), needs_group=True)
    policy = choose_policy(mode, context.device, precision)
    window = AccumulationWindow(accumulation, nonfinite_gradients=nonfinite_gradients)
    return DDPBackend(context, policy, window=window, settings=DDPSettings(**settings))


def step_and_clear(prepared: Prepared) -> None:
    """Step a model's first optimizer, and clear its gradients."""
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()


def prepare_sgd(backend: Any, model: Module, *, lr: float = 0.1) -> tuple[Any, Module, Any]:
    """Prepare a model with SGD over its parameters: the backend, the model and what is prepared."""
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=lr)], [])
    return backend, model, prepared


def plain_step(optimizer: Optimizer, loss: Tensor) -> None:
    """Step on a loss as a plain loop does, and clear its gradients."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
