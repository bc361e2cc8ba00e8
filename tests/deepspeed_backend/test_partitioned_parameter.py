"""What code outside DeepSpeed sees of a parameter that stage 3 has divided: shape and kind, never empty values."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from deepspeed_backend.engines import backend, told
from drivetrain_backends import full_state_dict

ACTS: dict[str, Callable[[nn.Module], object]] = {
    "state_dict": lambda m: m.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "average": AveragedModel,
    "shadow": lambda m: {n: p.detach().clone() for n, p in m.named_parameters()},
    "shadow of data": lambda m: {n: p.data.clone() for n, p in m.named_parameters()},
    "pickle of one": lambda m: [pickle.dumps(p) for p in m.parameters()],
    "clamped": lambda m: [setattr(p, "data", p.data.clamp(-1, 1)) for p in m.parameters()],
    "shadow added": lambda m: [torch.zeros(p.shape).add_(p) for p in m.parameters()],
    "several at once": lambda m: torch._foreach_mul(list(m.parameters()), 2.0),
    "penalty": lambda m: [p.pow(2).sum() for p in m.parameters()],
    "norm": lambda m: [torch.linalg.vector_norm(p) for p in m.parameters()],
    "orthogonal": lambda m: [p @ p.T for p in m.parameters() if p.ndim == 2],
    "data": lambda m: [setattr(p, "data", torch.ones(p.shape)) for p in m.parameters()],
    "gradient": lambda m: [setattr(p, "grad", torch.ones(p.shape)) for p in m.parameters()],
    "copy_": lambda m: [nn.init.zeros_(p) for p in m.parameters()],
    "dtype": lambda m: m.double(),
}


def looks() -> dict[str, Any]:
    """What each look at a model says, with weights that are partitioned between forwards."""
    found: dict[str, Any] = {}
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    with backend(config=config) as one:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
        plain = copy.deepcopy(model)
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        found["told"] = {name: told(lambda act=act: act(model)) for name, act in ACTS.items()}
        found["load"] = told(lambda: model.load_state_dict(plain.state_dict()))
        found["shapes"] = [
            (tuple(p.shape), p.ndim, p.numel(), torch.zeros_like(p).shape == p.size(), p.dtype, len(p))
            for p in model.parameters()
        ] == [(tuple(p.shape), p.ndim, p.numel(), True, p.dtype, len(p)) for p in plain.parameters()]
        found["text"] = str(model[0].weight)
        model.to("cpu").float()  # as before: nothing to convert
        with prepared.gathered():
            found["copied"] = told(lambda: copy.deepcopy(model))
            weight = copy.deepcopy(model[0].weight)
            found["weight"] = type(weight) is nn.Parameter and torch.equal(weight, plain[0].weight)
        x = torch.ones(4, 8)
        one.window.begin()
        prepared.backward(prepared.model(x).square().mean())
        prepared.optimizers[0].step()
        with prepared.gathered(write=True):
            model[2].weight.data = torch.ones(2, 6)
        found["written"] = full_state_dict(prepared.state_dict())["model"]["2.weight"].unique().tolist()
    found["after"] = {type(p) for p in model.parameters()} == {nn.Parameter}
    return found


def test_empty_weights_say_their_shape_and_refuse_to_be_read_by_name(run_ranks) -> None:
    (found,) = run_ranks(looks, num_processes=1)
    for name, said in found["told"].items():
        is_copy = name in ("deepcopy", "pickle", "average")
        assert said.startswith("TypeError: a copy of" if is_copy else "UnshardedParameterError: "), (
            name,
            said,
        )
        assert (
            is_copy or "of 0.weight, of shape (6, 8): DeepSpeed's stage 3 divides it among ranks" in said
        ), said
    assert "copy_() of 0.weight" in found["load"]
    assert found["shapes"]
    assert found["text"].endswith("Parameter of shape (6, 8), divided among ranks")
    assert found["copied"].startswith("TypeError: a copy of Sequential")
    assert found["weight"]
    assert found["written"] == [1.0]
    assert found["after"]


class Renormed(nn.Module):
    """A linear map whose weight is bounded in each forward, by assignment or in place."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.inner.weight.data = self.inner.weight.data.clamp(-0.1, 0.1)
        else:
            self.inner.weight.data.clamp_(-0.1, 0.1)
        return self.inner(x)


def built() -> dict[str, Any]:
    """What building, and forwards that write, do in stage 3."""
    found: dict[str, Any] = {}
    with backend(stage=3) as one:
        with one.building():
            torch.manual_seed(0)
            model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
            found["decayed"] = sum(p.ndim > 1 for p in model.parameters())
            nn.init.constant_(model.encoder.norm.weight, 2.0)
            model.decoder.norm.weight.data.fill_(3.0)
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        values = full_state_dict(prepared.state_dict())["model"]
        found["set"] = [values[f"{part}.norm.weight"].unique().tolist() for part in ("encoder", "decoder")]
        bound = (6 / (8 + 16)) ** 0.5  # of xavier_uniform_, which the constructor applies to its parts
        found["filled"] = bool(values["encoder.layers.0.linear1.weight"].abs().max() > 0.9 * bound)
    for assigns in (True, False):
        with backend(stage=3) as one:
            (prepared,) = one.prepare([m := Renormed(assigns)], [SGD(m.parameters(), lr=0.1)], [])
            one.window.begin()

            def train(prepared: Any = prepared) -> None:
                prepared.backward(prepared.model(torch.ones(2, 3)).square().mean())
                prepared.optimizers[0].step()

            found[f"renormed {assigns}"] = told(train)
    return found


def test_building_sees_full_shapes_and_fills_them_and_a_forward_that_writes_is_refused(run_ranks) -> None:
    (found,) = run_ranks(built, num_processes=1)
    plain = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    assert found["decayed"] == sum(p.ndim > 1 for p in plain.parameters())
    assert found["set"] == [[2.0], [3.0]]
    assert found["filled"]
    assert "an assignment to .data of inner.weight" in found["renormed True"]
    assert "inner.weight: written in place since the last step" in found["renormed False"]
