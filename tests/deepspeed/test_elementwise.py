"""Which optimizers may step on ZeRO's flat parts, tried on small tensors; and that those train as in a plain loop."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LambdaLR

from deepspeed_engines import backend
from drivetrain_deepspeed import EngineConfigError
from drivetrain_deepspeed.elementwise import check_elementwise
from plain_loop.case import Case, assert_equals_plain_loop

Make = Callable[[list[nn.Parameter]], Optimizer]
CPU = torch.device("cpu")


class PerElement(Optimizer):
    """Descends along what `direction` makes of a gradient."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.01, "num_steps": 0})

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        del parameter
        return gradient.sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["num_steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.direction(parameter, parameter.grad), alpha=group["lr"])


class TrustRatio(PerElement):
    """As LARS and LAMB do."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient * parameter.norm() / (gradient.norm() + 1e-9)


class Centralised(PerElement):
    """Takes the mean of each row off."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        del parameter
        return gradient - gradient.mean(-1, keepdim=True)


class Shampoo(PerElement):
    """Preconditions matrices by their rows."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        if gradient.dim() < 2:
            return gradient
        rows = gradient.reshape(len(gradient), -1)
        values, vectors = torch.linalg.eigh(rows @ rows.T + 1e-6 * torch.eye(len(rows), dtype=rows.dtype))
        return (vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T @ rows).view_as(parameter)


class Noisy(PerElement):
    """Adds noise."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(parameter)


class ClippedInside(SGD):
    """Clips over all groups as it steps."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class CountedByGroup(PerElement):
    """Its groups count their steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["lr"] = 0.01 / (1 + group["num_steps"])
        super().step()


class Lookahead(Optimizer):
    """Steps another optimizer, and returns half of the way at each fifth step."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.base.step()
        self.num_steps += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            if self.num_steps % 5 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))


def in_two_groups(make: Callable[[Any], Optimizer]) -> Make:
    return lambda p: make([{"params": p[:2]}, {"params": p[2:], "lr": 0.02, "weight_decay": 0.0}])


def of_transformers(parameters: list[nn.Parameter]) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=True)


def of_bitsandbytes(parameters: list[nn.Parameter]) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters)


def of_torchao(parameters: list[nn.Parameter]) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters)


KINDS: tuple[Callable[..., Optimizer], ...] = (
    *(ASGD, Adadelta, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, PerElement),
)
ELEMENTWISE: dict[str, Make] = {
    **{kind.__name__: kind for kind in KINDS},
    "SGD": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused": lambda p: AdamW(p, fused=True),
    "foreach": lambda p: AdamW(p, foreach=True, amsgrad=True, maximize=True),
    "learning rate in a tensor": lambda p: AdamW(p, lr=torch.tensor(0.01)),
    "two groups": in_two_groups(AdamW),
    "counted by its one group": CountedByGroup,
    "Lookahead": lambda p: Lookahead(AdamW(p, lr=0.01)),
}
OTHERS: dict[str, tuple[Make, str]] = {
    "Adafactor": (Adafactor, "its step is not elementwise"),
    "of transformers": (of_transformers, "Adafactor with .* not elementwise"),
    "TrustRatio": (TrustRatio, "not elementwise"),
    "ClippedInside": (lambda p: ClippedInside(p, lr=0.01), "not elementwise"),
    "clipped over two groups": (in_two_groups(lambda g: ClippedInside(g, lr=0.01)), "not elementwise"),
    "Centralised": (Centralised, "not elementwise"),
    "Shampoo": (Shampoo, "not elementwise"),
    "Noisy": (Noisy, "not elementwise"),
    "8-bit": (of_bitsandbytes, "AdamW8bit with .* not elementwise"),
    "Muon": (lambda p: Muon([one for one in p if one.dim() == 2]), "tried on small tensors, and failed"),
    "LBFGS": (LBFGS, "failed: TypeError: .*closure"),
    "Lookahead of two groups": (lambda p: Lookahead(in_two_groups(AdamW)(p)), "not elementwise"),
}
IMPORTED = ("of transformers", "8-bit")  # whose packages take seconds to import


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 66), nn.Conv2d(2, 3, 3), nn.LayerNorm(5))
    return list(model.parameters())


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.slow
def test_an_elementwise_optimizer_is_allowed(name: str) -> None:
    for stage in (2, 3):
        check_elementwise(ELEMENTWISE[name](parameters()), stage, device=CPU, num_parts=1)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in IMPORTED else n for n in OTHERS]
)
def test_an_optimizer_that_looks_beyond_an_element_is_refused_with_what_works(name: str) -> None:
    make, said = OTHERS[name]
    with pytest.raises(EngineConfigError, match=rf"{said}(.|\n)*deepspeed.stage=0 or backend='ddp'"):
        check_elementwise(make(parameters()), 2, device=CPU)


@pytest.mark.parametrize("rate", [0.0, 1e-5])
def test_a_learning_rate_that_moves_nothing_yet_hides_nothing(rate: float) -> None:
    for make in (TrustRatio, lambda p: ClippedInside(p, lr=0.01)):
        for as_tensor in (False, True):
            optimizer = make(parameters())
            for group in optimizer.param_groups:  # as a warm-up makes it, before prepare
                group["lr"] = torch.tensor(rate) if as_tensor else rate
            with pytest.raises(EngineConfigError, match="not elementwise"):
                check_elementwise(optimizer, 2, device=CPU)
            assert [float(group["lr"]) for group in optimizer.param_groups] == [pytest.approx(rate)]
    optimizer = AdamW(parameters(), lr=0.02)
    schedule = LambdaLR(optimizer, lambda step: step * rate)
    check_elementwise(optimizer, 2, device=CPU)
    assert schedule.get_last_lr() == [0.0]


class Idle(PerElement):
    """Moves nothing."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        del parameter
        return gradient * 0


def test_an_optimizer_that_moves_nothing_when_tried_is_refused() -> None:
    with pytest.raises(EngineConfigError, match=r"Idle with deepspeed.stage=2: .* too little to tell"):
        check_elementwise(Idle(parameters()), 2, device=CPU)


def test_a_count_of_steps_by_group_is_refused_where_stage_3_steps_a_group_in_parts() -> None:
    check_elementwise(CountedByGroup(parameters()), 3, device=CPU, num_parts=1)
    check_elementwise(in_two_groups(CountedByGroup)(parameters()), 2, device=CPU)
    for optimizer, num_parts in (
        (CountedByGroup(parameters()), 2),
        (in_two_groups(CountedByGroup)(parameters()), 1),
    ):
        with pytest.raises(
            EngineConfigError, match=r"CountedByGroup with deepspeed.stage=3: .*not elementwise"
        ):
            check_elementwise(optimizer, 3, device=CPU, num_parts=num_parts)


def test_trying_changes_neither_the_optimizer_nor_a_generator() -> None:
    own = parameters()
    optimizer = AdamW(own, lr=0.01)
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    LambdaLR(optimizer, lambda _: 1.0)  # wraps step
    values, groups = [p.detach().clone() for p in own], copy.copy(optimizer.param_groups)
    state = torch.get_rng_state()
    check_elementwise(optimizer, 2, device=CPU)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(values, own, strict=True))
    assert optimizer.param_groups == groups
    assert not optimizer.state
    assert not steps
    assert all(p.grad is None for p in own)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_prepare_refuses_an_optimizer_on_all_ranks_before_anything_is_changed(stage: int) -> None:
    """The last rank's is wrong; after it the same model is prepared with another optimizer."""
    with backend(stage=stage) as one:
        model, is_last = nn.Linear(3, 3), one.context.topology.rank == 1
        given = TrustRatio(model.parameters()) if is_last else SGD(model.parameters(), lr=0.1)
        said = f"TrustRatio with deepspeed.stage={stage}: its step is not elementwise"
        ending = "" if is_last else r".* \(of rank 1's optimizer\)$"
        with pytest.raises(EngineConfigError, match=f"^{said}{ending}"):
            one.prepare([model], [given], [])
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        assert prepared.unwrap() is model


@pytest.mark.slow
def test_compiled_8_bit_steps_are_tried_without_compiling() -> None:
    with pytest.raises(
        EngineConfigError, match=r"AdamW8bit with deepspeed.stage=2: its step is not elementwise"
    ):
        check_elementwise(of_torchao(parameters()), 2, device=CPU)


# Rprop follows the sign of a sum; a Lookahead keeps a state that ZeRO could not save, and is refused for it.
NOT_COMPARED = ("counted by its one group", "Rprop", "Lookahead")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of_batch(model: nn.Module, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return model(torch.randn(4, 5, generator=generator)).square().mean()


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if name not in NOT_COMPARED])
def test_an_allowed_optimizer_trains_as_in_a_plain_loop(name: str, stage: int) -> None:
    make = ELEMENTWISE[name]
    case = Case(build=build, loss=loss_of_batch, optimizer=lambda p: make(list(p)), steps=6)
    with backend(stage=stage) as one:
        assert_equals_plain_loop(case, one, rtol=0, atol=1e-4)  # a sign or a first step of Adam's is 0.01
