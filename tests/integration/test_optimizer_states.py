"""State that an optimizer keeps elsewhere than with its parameters: kept through its own `state_dict`, or refused."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from drivetrain_backends import OptimizerStateError
from integration.own_state_optimizers import Chained, Hooked, Keyed, Lookahead, Own
from plain_loop.accelerated import accelerator_of, assert_equal_weights, take_steps, weights_of

ALL: list[type[Optimizer]] = [Hooked, Own, Keyed, Lookahead, Chained]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def run(
    folder: Path, kind: type[Optimizer], steps: int, *, resume: bool = False, backend: str = "usual"
) -> dict[str, Tensor]:
    """Train some steps, or go on from the newest checkpoint, and save; return the weights after it."""
    with accelerator_of(backend, project_dir=folder) as accelerator:
        net = model()
        net, optimizer = accelerator.prepare(net, kind(net.parameters()))
        start = accelerator.load_state() if resume else 0

        def loss_of(step: int) -> Tensor:
            return net(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().mean()

        take_steps(accelerator, net, optimizer, loss_of, range(start, start + steps))
        accelerator.save_state()
        return weights_of(accelerator, net)


def check_goes_on(folder: Path, kind: type[Optimizer], backend: str = "usual") -> None:
    whole = run(folder / "whole", kind, 4, backend=backend)
    run(folder / "parts", kind, 3, backend=backend)
    assert_equal_weights(run(folder / "parts", kind, 1, resume=True, backend=backend), whole)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.default_cases("Keyed")
def test_an_optimizers_own_state_goes_on_in_one_process(tmp_path: Path, kind: type[Optimizer]) -> None:
    check_goes_on(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ALL)
def test_an_optimizers_own_state_goes_on_under_ddp(tmp_path: Path, kind: type[Optimizer]) -> None:
    check_goes_on(tmp_path, kind, "ddp")


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Hooked, Own, Keyed])
def test_numbers_alone_go_on_under_fsdp_and_from_backend_to_backend(
    tmp_path: Path, kind: type[Optimizer]
) -> None:
    check_goes_on(tmp_path, kind, "fsdp")
    there = run(tmp_path / "parts", kind, 1, resume=True, backend="ddp")
    here = run(tmp_path / "whole", kind, 1, resume=True, backend="fsdp")
    torch.testing.assert_close(there, here, rtol=0, atol=1e-6)


def be_refused(backend: str, kind: type[Optimizer], said: str) -> None:
    with accelerator_of(backend) as accelerator:
        net = model()
        with pytest.raises(OptimizerStateError, match=said):
            accelerator.prepare(net, kind(net.parameters()))


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Lookahead, Chained])
def test_fsdp_refuses_state_that_it_cannot_divide(kind: type[Optimizer]) -> None:
    be_refused("fsdp", kind, rf"{kind.__name__}: .*'all of it'.* FSDP cannot divide")


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_seconds=150)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_refuses_state_that_it_cannot_divide_before_it_is_lost(tmp_path: Path, stage: int) -> None:
    for kind in (Hooked, Own, Lookahead):
        be_refused(f"deepspeed-{stage}", kind, rf"{kind.__name__}: .* ZeRO cannot divide that")
    with pytest.raises(OptimizerStateError, match=r"Keyed: its state_dict\(\) holds \['k'\]"):
        run(tmp_path, Keyed, 1, backend=f"deepspeed-{stage}")


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_seconds=150)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("kind", [Hooked, Lookahead])
def test_an_optimizers_own_state_goes_on_in_stage_0(tmp_path: Path, kind: type[Optimizer]) -> None:
    check_goes_on(tmp_path, kind, "deepspeed-0")


@pytest.mark.slow
def test_a_state_of_another_kind_of_optimizer_is_refused(tmp_path) -> None:
    run(tmp_path / "hooked", Hooked, 1)
    run(tmp_path / "plain", PlainSGD, 1)
    run(tmp_path / "lookahead", Lookahead, 1)
    with pytest.raises(ValueError, match=r"state_dict\(\) of PlainSGD has not \['seen'\] of the checkpoint"):
        run(tmp_path / "hooked", PlainSGD, 1, resume=True)
    with pytest.raises(
        ValueError, match=r"state_dict\(\) of Own has \['seen'\], which the checkpoint has not"
    ):
        run(tmp_path / "plain", Own, 1, resume=True)
    with pytest.raises(
        ValueError, match="the state of Own is kept by parameter, and the checkpoint's of a form"
    ):
        run(tmp_path / "lookahead", Own, 1, resume=True)
    with pytest.raises(ValueError, match="stand in another order now"):
        run(tmp_path / "lookahead", Reversed, 1, resume=True)


class PlainSGD(SGD):
    def __init__(self, params) -> None:
        super().__init__(params, lr=0.1)


class Reversed(Lookahead):
    def __init__(self, params) -> None:
        super().__init__(reversed(list(params)))


def test_what_steps_parameters_and_is_no_optimizer_of_torch_is_no_scheduler() -> None:
    class Wrapper:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None: ...

        def zero_grad(self) -> None: ...

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    net = model()
    with pytest.raises(
        TypeError, match=r"argument 1 \(Wrapper\) steps parameters and is no torch.optim.Optimizer"
    ):
        accelerator_of().prepare(net, Wrapper(Adam(net.parameters())))


@pytest.mark.ranks(2, timeout_seconds=120)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_an_optimizer_or_scheduler_over_shards_is_not_copied(backend: str) -> None:
    with accelerator_of(backend) as accelerator:
        net = model()
        optimizer = SGD(net.parameters(), lr=1.0)
        for value in accelerator.prepare(net, optimizer, StepLR(optimizer, 1))[1:]:
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=r"SGD cannot be copied or pickled: .* divided among"):
                    duplicate(value)
