"""Optimizers and parameters under FSDP: as a plain loop has them, or refused at prepare."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from backends.replicas import plain_step, step_and_clear
from drivetrain_backends import FSDPBackend
from sharded_stack import fsdp, loss_of, stack, weights


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


def simple(how: str) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda parameters: Simple(parameters, how)


KINDS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sign": simple("sign"),
    "trust ratio": simple("trust_ratio"),
    "clipped": simple("clipped"),
    "local norm": simple("local_norm"),
    "whitened": simple("whitened"),
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
REFUSED = {"local norm"}  # whatever torch's operations do


def train(backend: FSDPBackend, make: Callable[[list[nn.Parameter]], Optimizer]) -> dict[str, Tensor] | str:
    model = stack(0, width=6)
    try:
        (prepared,) = backend.prepare([model], [make(list(model.parameters()))], [])
    except ValueError as error:
        return str(error)
    for _ in range(3):
        backend.window.begin()
        prepared.backward(loss_of(prepared.model, dist.get_rank()))
        step_and_clear(prepared)
    return weights(prepared)


def train_each(names: list[str]) -> dict[str, dict[str, Tensor] | str]:
    found: dict[str, dict[str, Tensor] | str] = {}
    for name in names:
        backend = fsdp()
        found[name] = train(backend, KINDS[name])
        backend.close()
    return found


def train_plainly(make: Callable[[list[nn.Parameter]], Optimizer]) -> dict[str, Tensor]:
    model = stack(0, width=6)
    optimizer = make(list(model.parameters()))
    for _ in range(3):
        plain_step(optimizer, torch.stack([loss_of(model, rank) for rank in range(2)]).mean())
    return dict(model.state_dict())


@pytest.mark.slow
def test_optimizers_step_as_in_a_plain_loop_or_are_refused(run_ranks) -> None:
    expected = {name: train_plainly(make) for name, make in KINDS.items()}
    first, second = run_ranks(train_each, list(KINDS))
    for name, want in expected.items():
        for have in (first[name], second[name]):
            if isinstance(have, str):
                assert "cannot step shards" in have
                assert "backend='ddp'" in have
            else:
                for key, value in want.items():
                    torch.testing.assert_close(have[key], value, rtol=1e-4, atol=1e-5)
    assert {name for name in REFUSED if not isinstance(first[name], str)} == set()
    for name in ("sign", *(kind.__name__ for kind in KNOWN)):
        assert not isinstance(first[name], str)


def probed() -> tuple[bool, bool]:
    """Whether a probe leaves the optimizer with its schedule, and the generator, as they were."""
    backend = fsdp()
    model = stack(0)
    optimizer = Simple(model.parameters(), "sign")
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    random = torch.get_rng_state()
    backend.prepare([model], [optimizer], [schedule])
    kept = not optimizer.state and schedule.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.1
    same = torch.equal(random, torch.get_rng_state())
    trusting = fsdp(check_optimizers=False)
    other = stack(1)
    trusting.prepare([other], [Simple(other.parameters(), "local_norm")], [])
    trusting.close()
    backend.close()
    return kept, same


def test_a_probe_leaves_everything_as_it_was_and_can_be_left_out(run_ranks) -> None:
    for kept, same in run_ranks(probed):
        assert kept
        assert same


class OwnAdamW(optim.AdamW):
    """A class that has to be tried."""


class Idle(Simple):
    """Moves nothing."""

    def _sign(self, p: Tensor, rate: float) -> None:
        del p, rate


def warmed_up() -> dict[str, str]:
    """What is said of optimizers whose learning rate moves nothing yet."""
    said: dict[str, str] = {}
    backend = fsdp()  # one for all: each brings groups of its own
    for dtype in (torch.float32, torch.bfloat16):
        for rate in (0.0, 1e-5):
            for name, make in {**KINDS, "own AdamW": OwnAdamW, "idle": lambda p: Idle(p, "sign")}.items():
                if name not in ("local norm", "sign", "clipped", "own AdamW", "idle"):
                    continue
                model = stack(0, width=6).to(dtype)
                optimizer = make(list(model.parameters()))
                optimizer.param_groups[0]["lr"] = rate
                try:
                    backend.prepare([model], [optimizer], [])
                except ValueError as error:
                    said[f"{name} {rate} {dtype}"] = str(error)
                assert optimizer.param_groups[0]["lr"] == rate
    backend.close()
    return said


@pytest.mark.slow
def test_a_learning_rate_that_moves_nothing_yet_hides_nothing(run_ranks) -> None:
    for said in run_ranks(warmed_up):
        assert {name.split(" 0.0")[0].split(" 1e-05")[0] for name in said} == {"local norm", "idle"}, said
        assert len(said) == 8
        for name, message in said.items():
            expected = "too little to tell" if name.startswith("idle") else "elsewhere than whole ones"
            assert expected in message


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


def eight_bits() -> str:
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

    for make in (
        AdamW8bit,
        AdamW4bit,
        AdamWFp8,
    ):  # whose blocks lie within shards, or whose states are in fp32
        backend = fsdp()
        model = nn.Linear(64, 128)
        backend.prepare([model], [make(model.parameters())], [])
        backend.close()
    backend, model = fsdp(), nn.Linear(64, 128)
    with pytest.raises(ValueError, match="BlocksAcrossShards") as caught:
        backend.prepare([model], [BlocksAcrossShards(model.parameters())], [])
    backend.close()
    return str(caught.value)


def test_states_in_eight_bits_are_stepped_where_blocks_lie_within_shards_and_refused_elsewhere(
    run_ranks,
) -> None:
    pytest.importorskip("torchao")
    for said in run_ranks(eight_bits):
        assert "moves them elsewhere than whole ones" in said or "fails on another rank" in said
