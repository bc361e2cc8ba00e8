"""What code outside DeepSpeed sees of a parameter that stage 3 has divided: shape and kind, never empty values."""

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from deepspeed_engines import backend, engine_of, take_step, told
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


@pytest.mark.ranks(1)
def test_empty_weights_say_their_shape_and_refuse_to_be_read_by_name() -> None:
    """With weights that are partitioned between forwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    plain = copy.deepcopy(model)
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    with engine_of(model, lr=0.1, config=config) as (_, _, prepared):
        for name, act in ACTS.items():
            said = told(partial(act, model))
            if name in ("deepcopy", "pickle", "average"):
                assert said.startswith("TypeError: a copy of"), (name, said)
            else:
                assert said.startswith("UnshardedParameterError: "), (name, said)
                assert "of 0.weight, of shape (6, 8): DeepSpeed's stage 3 divides it among ranks" in said, (
                    name
                )
        assert "copy_() of 0.weight" in told(lambda: model.load_state_dict(plain.state_dict()))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.shape, p.ndim, p.numel(), p.dtype, len(p)) == (
                q.shape,
                q.ndim,
                q.numel(),
                q.dtype,
                len(q),
            )
            assert torch.zeros_like(p).shape == p.size()
        assert str(model[0].weight).endswith("Parameter of shape (6, 8), divided among ranks")
        model.to("cpu").float()  # as before: nothing to convert
        with prepared.gathered():
            assert told(lambda: copy.deepcopy(model)).startswith("TypeError: a copy of Sequential")
            weight = copy.deepcopy(model[0].weight)
            assert type(weight) is nn.Parameter
            assert torch.equal(weight, plain[0].weight)
        take_step(prepared, prepared.model(torch.ones(4, 8)).square().mean())
        with prepared.gathered(write=True):
            model[2].weight.data = torch.ones(2, 6)
        assert full_state_dict(prepared.state_dict())["model"]["2.weight"].unique().tolist() == [1.0]
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


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


@pytest.mark.ranks(1)
def test_building_sees_full_shapes_and_fills_them() -> None:
    plain = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    with backend(stage=3) as one:
        with one.building():
            torch.manual_seed(0)
            model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
            assert sum(p.ndim > 1 for p in model.parameters()) == sum(p.ndim > 1 for p in plain.parameters())
            nn.init.constant_(model.encoder.norm.weight, 2.0)
            model.decoder.norm.weight.data.fill_(3.0)
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        values = full_state_dict(prepared.state_dict())["model"]
        assert [values[f"{p}.norm.weight"].unique().tolist() for p in ("encoder", "decoder")] == [
            [2.0],
            [3.0],
        ]
        bound = (6 / (8 + 16)) ** 0.5  # of xavier_uniform_, which the constructor applies to its parts
        assert values["encoder.layers.0.linear1.weight"].abs().max() > 0.9 * bound


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("assigns", "said"),
    [
        (True, r"an assignment to \.data of inner\.weight"),
        (False, r"inner\.weight: written in place since the last step"),
    ],
)
def test_a_forward_that_writes_is_refused(assigns: bool, said: str) -> None:
    with engine_of(Renormed(assigns), stage=3, lr=0.1) as (_, _, prepared):

        def train() -> None:
            take_step(prepared, prepared.model(torch.ones(2, 3)).square().mean())

        with pytest.raises((RuntimeError, ValueError, TypeError), match=said):
            train()
