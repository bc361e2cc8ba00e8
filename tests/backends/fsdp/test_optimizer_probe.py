"""Optimizers and parameters under FSDP: as a plain loop has them, or refused at prepare."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from plain_loop.backends import fsdp
from plain_loop.case import assert_equals_plain_loop
from plain_loop.stack import CASE, stack

pytestmark = pytest.mark.ranks(2)


class Simple(Optimizer):
    """An optimizer of one rule; `how` gives the update of a parameter."""

    def __init__(self, parameters: object, how: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.how = how

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    getattr(self, f"_{self.how}")(p, group["lr"])

    def _sign(self, p: Tensor, rate: float) -> None:
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        p.add_(average.mul_(0.9).add_(p.grad).sign(), alpha=-rate)

    def _trust_ratio(self, p: Tensor, rate: float) -> None:  # as LARS and LAMB
        p.sub_(p.grad * (rate * p.norm() / (p.grad.norm() + 1e-9)))

    def _local_norm(self, p: Tensor, rate: float) -> None:  # as a kernel of its own computes, past DTensor
        part = p.to_local() if hasattr(p, "to_local") else p
        slope = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        part.sub_(slope * (rate / (slope.norm() + 1e-9)))

    def _clipped(self, p: Tensor, rate: float) -> None:
        nn.utils.clip_grad_norm_([q for group in self.param_groups for q in group["params"]], 0.5)
        p.sub_(p.grad, alpha=rate)

    def _whitened(self, p: Tensor, rate: float) -> None:  # as Shampoo: a root of a matrix of all rows
        if p.dim() != 2:
            p.sub_(p.grad, alpha=rate)
            return
        values, vectors = torch.linalg.eigh(p.grad @ p.grad.T + torch.eye(p.shape[0]))
        p.sub_(vectors @ torch.diag(values.rsqrt()) @ vectors.T @ p.grad, alpha=rate)


KINDS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sign": partial(Simple, how="sign"),
    "trust ratio": partial(Simple, how="trust_ratio"),
    "clipped": partial(Simple, how="clipped"),
    "local norm": partial(Simple, how="local_norm"),
    "whitened": partial(Simple, how="whitened"),
    "torch Adafactor": lambda parameters: optim.Adafactor(parameters, lr=0.05),
    "Muon": lambda parameters: optim.Muon([p for p in parameters if p.dim() == 2], lr=0.05),
}
KNOWN = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad),
    *(optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)
KINDS |= {kind.__name__: partial(kind, lr=0.05) for kind in KNOWN}
if find_spec("transformers") is not None:  # not where the package stands alone

    def transformers_adafactor(parameters: list[nn.Parameter]) -> Optimizer:
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=0.05, relative_step=False, scale_parameter=True)

    KINDS["transformers Adafactor"] = transformers_adafactor


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_optimizers_step_as_in_a_plain_loop_or_are_refused(name: str) -> None:
    case = replace(CASE, optimizer=lambda parameters: KINDS[name](list(parameters)))
    refusal = ""
    try:
        assert_equals_plain_loop(case, fsdp(), rtol=1e-4, atol=1e-5)
    except ValueError as error:
        refusal = str(error)
    assert bool(refusal) or name != "local norm"  # it is refused whatever torch's operations do
    assert not refusal or ("cannot step shards" in refusal and "backend='ddp'" in refusal)
    assert not refusal or name not in ("sign", *(kind.__name__ for kind in KNOWN))


def test_a_probe_leaves_everything_as_it_was_and_can_be_left_out() -> None:
    model, other = stack(0), stack(1)
    optimizer = Simple(model.parameters(), "sign")
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    random = torch.get_rng_state()
    fsdp().prepare([model], [optimizer], [schedule])
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.1)
    fsdp(check_optimizers=False).prepare([other], [Simple(other.parameters(), "local_norm")], [])


class OwnAdamW(optim.AdamW):
    """A class that has to be tried."""


class Idle(Simple):
    """Moves nothing."""

    def _sign(self, p: Tensor, rate: float) -> None:
        del p, rate


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learning_rate_that_moves_nothing_yet_hides_nothing(dtype: torch.dtype, rate: float) -> None:
    backend = fsdp()  # one for all: each brings groups of its own
    kinds = {**KINDS, "own AdamW": OwnAdamW, "idle": lambda p: Idle(p, "sign")}
    said = {"idle": "too little to tell", "local norm": "elsewhere than whole ones"}
    for name in ("local norm", "sign", "clipped", "own AdamW", "idle"):
        model = stack(0).to(dtype)
        optimizer = kinds[name](list(model.parameters()))
        optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(ValueError, match=said[name]) if name in said else nullcontext():
            backend.prepare([model], [optimizer], [])
        assert optimizer.param_groups[0]["lr"] == rate


class BlocksAcrossShards(Optimizer):
    """As a low-bit optimizer whose blocks do not follow the shards: it scales by blocks of a shard's own columns."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            part = p.to_local() if hasattr(p, "to_local") else p
            slope = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            scale = slope.abs().amax(0, keepdim=True) + 1e-9 if slope.dim() > 1 else 1.0
            part.sub_((slope / scale).mul_(8).round_().mul_(scale * 0.1 / 8))


@pytest.mark.slow
def test_states_in_eight_bits_are_stepped_where_blocks_lie_within_shards_and_refused_elsewhere() -> None:
    optim = pytest.importorskip("torchao.optim")
    for make in (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8):  # blocks within shards, or states in fp32
        model = nn.Linear(64, 128)
        fsdp().prepare([model], [make(model.parameters())], [])
    model = nn.Linear(64, 128)
    with pytest.raises(
        ValueError, match=r"BlocksAcrossShards.*(elsewhere than whole ones|fails on another rank)"
    ):
        fsdp().prepare([model], [BlocksAcrossShards(model.parameters())], [])
