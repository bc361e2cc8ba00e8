"""What the tests of the engines share: a backend in a group, and a small model."""

import shutil
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain_backends import AccumulationWindow
from drivetrain_backends.state_dict import full_tensors as states
from drivetrain_deepspeed import DeepSpeedBackend, DeepSpeedSettings
from drivetrain_precision import Policy, PrecisionSettings, choose_policy
from drivetrain_state import StateSettings, connect


@contextmanager
def backend(
    *,
    mode: str = "no",
    accumulation: int = 1,
    scale: float | None = None,
    nonfinite: Any = "warn",
    **settings: Any,
) -> Generator[DeepSpeedBackend]:
    """A backend on the CPU; with `scale`, losses of fp32 are scaled as those of fp16 are."""
    with connect(StateSettings(device="cpu", watchdog=False), needs_group=True) as context:
        policy = choose_policy(mode, context.device)
        if scale is not None:
            scaling = PrecisionSettings(initial_scale=scale)
            policy = Policy(mode="no", autocast_dtype=None, scaling=scaling, reason="scaled for a test")
        made = DeepSpeedBackend(
            context,
            policy,
            window=AccumulationWindow(accumulation, on_nonfinite=nonfinite),
            settings=DeepSpeedSettings(**settings),
        )
        try:
            yield made
        finally:
            made.close()


class Weights(nn.Module):
    """Three weights w; maps x of shape (3,) to the sum of w * x, so that a loss's gradient is known by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


@contextmanager
def engine_of(
    model: Any = None, *, lr: float = 1.0, **settings: Any
) -> Generator[tuple[DeepSpeedBackend, Any, Any]]:
    """A backend, a model, by default `Weights`, and what is prepared of it with SGD."""
    with backend(**settings) as made:
        model = Weights() if model is None else model
        (prepared,) = made.prepare([model], [SGD(model.parameters(), lr=lr)], [])
        yield made, model, prepared


X = torch.tensor([1.0, 2.0, 3.0])  # the gradient of `Weights` in the tests


def moved(prepared: Any) -> list[float]:
    """How far the weights of a prepared `Weights` have moved from their start."""
    return [1 - w for w in weights(prepared)]


def take_step(prepared: Any, loss: Tensor) -> None:
    """Train on a loss that is a window of its own."""
    prepared.backward(loss)
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()


def weights(prepared: Any) -> list[float]:
    """The weights of a prepared `Weights`, whole."""
    return states.full_tensor(prepared.state_dict()["model"]["w"]).tolist()


def error_of(kind: type[Exception], act: Callable[[], object]) -> str:
    """The message of the error that `act` raises."""
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def told(act: Callable[[], object]) -> str:
    """The error of a call by its class and message, or "nothing"."""
    try:
        act()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def has_libaio() -> bool:
    """Whether a C compiler finds the headers that DeepSpeed compiles its engine for drives with."""
    compiler = shutil.which("cc")
    words = ["-E", "-include", "libaio.h", "-x", "c", "/dev/null"]
    return compiler is not None and subprocess.run([compiler, *words], capture_output=True).returncode == 0
