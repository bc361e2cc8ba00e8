"""State that an optimizer keeps elsewhere than with its parameters: kept through its own `state_dict`, or refused."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from drivetrain import Accelerator
from drivetrain_backends import OptimizerStateError
from own_state_optimizers import Chained, Hooked, Keyed, Lookahead, Own

ALL: list[type[Optimizer]] = [Hooked, Own, Keyed, Lookahead, Chained]
QUIET = {"run": {"show_plan": False}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def run(
    folder: Path,
    kind: type[Optimizer],
    steps: int,
    *,
    resume: bool,
    sections: object = QUIET,
    **options: object,
) -> list[float]:
    """Train some steps, or go on from the newest checkpoint, and save; the weights after it."""
    with Accelerator(cpu=True, project_dir=folder, sections=sections, **options) as accelerator:
        net = model()
        net, optimizer = accelerator.prepare(net, kind(net.parameters()))
        start = accelerator.load_state() if resume else 0
        for step in range(start, start + steps):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            accelerator.backward(net(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state()
        state = accelerator.get_state_dict(net, everywhere=True)
        return torch.cat([value.flatten() for value in state.values()]).tolist()


def assert_goes_on(folder: Path, kind: type[Optimizer], **options: object) -> list[float]:
    whole = run(folder / "whole", kind, 4, resume=False, **options)
    run(folder / "parts", kind, 3, resume=False, **options)
    assert run(folder / "parts", kind, 1, resume=True, **options) == whole, kind.__name__
    return whole


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.default_cases("Keyed")
def test_an_optimizers_own_state_goes_on_in_one_process(tmp_path: Path, kind: type[Optimizer]) -> None:
    assert_goes_on(tmp_path, kind)


def go_on_replicated_and_sharded(folder: str) -> None:
    for kind in ALL:
        assert_goes_on(Path(folder, kind.__name__), kind, backend="ddp")
    for kind in (Hooked, Own, Keyed):  # numbers alone, the same on every rank
        place = Path(folder, f"{kind.__name__}-sharded")
        assert_goes_on(place, kind, backend="fsdp")
        there = run(place / "parts", kind, 1, resume=True, backend="ddp")  # and from backend to backend
        assert there == pytest.approx(run(place / "whole", kind, 1, resume=True, backend="fsdp"), abs=1e-6)
    for kind, what in ((Lookahead, "all of it"), (Chained, "all of it")):
        with Accelerator(cpu=True, backend="fsdp", sections=QUIET) as accelerator:
            net = model()
            with pytest.raises(
                OptimizerStateError, match=rf"{kind.__name__}: .*'{what}'.* FSDP cannot divide"
            ):
                accelerator.prepare(net, kind(net.parameters()))


@pytest.mark.slow
def test_an_optimizers_own_state_goes_on_under_ddp_and_as_numbers_under_fsdp(run_ranks, tmp_path) -> None:
    run_ranks(go_on_replicated_and_sharded, str(tmp_path))


def refuse_under_zero(folder: str) -> None:
    for stage in (1, 2, 3):
        sections = {**QUIET, "deepspeed": {"stage": stage}}
        for kind in (Hooked, Own, Lookahead):
            with Accelerator(cpu=True, backend="deepspeed", sections=sections) as accelerator:
                net = model()
                with pytest.raises(
                    OptimizerStateError, match=rf"{kind.__name__}: .* ZeRO cannot divide that"
                ):
                    accelerator.prepare(net, kind(net.parameters()))
        with pytest.raises(OptimizerStateError, match=r"Keyed: its state_dict\(\) holds \['k'\]"):
            run(Path(folder, str(stage)), Keyed, 1, resume=False, backend="deepspeed", sections=sections)
    zero = {"sections": {**QUIET, "deepspeed": {"stage": 0}}}
    for kind in (Hooked, Lookahead):
        assert_goes_on(Path(folder, kind.__name__), kind, backend="deepspeed", **zero)


@pytest.mark.slow
def test_zero_refuses_state_that_it_cannot_divide_before_it_is_lost(
    run_ranks, tmp_path, deepspeed_operators
) -> None:
    run_ranks(refuse_under_zero, str(tmp_path), timeout_seconds=150)


@pytest.mark.slow
def test_a_state_of_another_kind_of_optimizer_is_refused(tmp_path) -> None:
    run(tmp_path / "hooked", Hooked, 1, resume=False)
    run(tmp_path / "plain", PlainSGD, 1, resume=False)
    run(tmp_path / "lookahead", Lookahead, 1, resume=False)
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
        Accelerator(cpu=True).prepare(net, Wrapper(Adam(net.parameters())))


def refuse_copies_of_shards() -> None:
    for name in ("fsdp", "deepspeed"):
        with Accelerator(cpu=True, backend=name, sections=QUIET) as accelerator:
            net = model()
            optimizer = SGD(net.parameters(), lr=1.0)
            for value in accelerator.prepare(net, optimizer, StepLR(optimizer, 1))[1:]:
                for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                    with pytest.raises(TypeError, match=r"SGD cannot be copied or pickled: .* divided among"):
                        duplicate(value)


def test_an_optimizer_or_scheduler_over_shards_is_not_copied(run_ranks, deepspeed_operators) -> None:
    run_ranks(refuse_copies_of_shards, timeout_seconds=120)
