"""Layers that ranks divide train as whole ones under every strategy, or are refused before anything changes."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from drivetrain_backends import BackendContract, DDPBackend, DDPSettings, FSDPBackend, SingleBackend
from drivetrain_backends.errors import DriftedReplicasError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.state_dict.full_tensors import full_model, load_full_state_dict
from drivetrain_precision import choose_policy
from drivetrain_state import Context, ParallelDims, gather_object
from drivetrain_weights.meta_init import parameters_on_meta
from plain_loop.backends import context

BACKENDS = {"single": SingleBackend, "ddp": DDPBackend, "fsdp": FSDPBackend}
MESHES = {
    "tensor 2": ParallelDims(tensor=2),
    "tensor 3": ParallelDims(tensor=3),
    "data 2 x tensor 2": ParallelDims(data=2, tensor=2),
    "shard 2 x tensor 2": ParallelDims(shard=2, tensor=2),
}
NUM_RANKS = {"tensor 2": 2, "tensor 3": 3}


CASES = ("count, accumulated, clipped, uneven tails, 20 steps", "frozen layer")


def contract(kind: str, mesh: str, is_whole: bool) -> None:
    class Contract(BackendContract):
        backend = BACKENDS[kind]

    with context(parallelism=MESHES[mesh]) as where:
        if is_whole:
            Contract().check_all(where)
        for name in () if is_whole else CASES:
            Contract().check_case(where, name, Contract.cases[name])


@pytest.mark.parametrize("is_whole", [False, True], ids=["two cases", "whole"])
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("single", "tensor 2"),
        ("single", "tensor 3"),
        ("ddp", "tensor 2"),
        ("fsdp", "tensor 2"),
        ("ddp", "data 2 x tensor 2"),
        ("fsdp", "data 2 x tensor 2"),
        ("fsdp", "shard 2 x tensor 2"),
    ],
)
@pytest.mark.default_cases("single-tensor 2-two cases")
def test_the_contract_holds_on_divided_layers(run_ranks, kind: str, mesh: str, is_whole: bool) -> None:
    run_ranks(contract, kind, mesh, is_whole, num_processes=NUM_RANKS.get(mesh, 4), timeout_seconds=170)


class Perceptron(nn.Module):
    """Two layers that ranks divide, an embedding and a norm that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)
        self.layers = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) tokens to (batch, length, 6)."""
        return self.layers(self.norm(self.words(tokens)))


STYLES = {"words": "vocabulary", "layers.0": "column", "layers.2": "row"}
TOKENS = torch.tensor([[0, 4, 2], [1, 3, 3]])


def prepared(where: Context, kind: str, model: nn.Module, optimizer: Optimizer, **window: str):
    policy = choose_policy("no", where.device)
    backend = BACKENDS[kind](where, policy, window=AccumulationWindow(1, **window))
    return backend, backend.prepare([model], [optimizer], [])[0]


def first_values(kind: str, mesh: str, on_meta: bool) -> list[bool]:
    """Whether a model that ranks build with their own seeds begins with rank 0's values, or is filled on meta."""
    sizes = {name: getattr(MESHES[mesh], name) for name in ("data", "shard", "tensor")}
    with context(parallelism=ParallelDims(**sizes, tensor_styles=STYLES)) as where:
        torch.manual_seed(where.topology.rank)
        if on_meta:
            with parameters_on_meta():
                model = Perceptron()
        else:
            model = Perceptron()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        backend, one = prepared(where, kind, model, SGD(model.parameters(), lr=0.1))
        found = full_model(one, where, everywhere=True)
        backend.close()
        everywhere = gather_object(where, {name: value.tolist() for name, value in found.items()})
        assert all(each == everywhere[0] for each in everywhere)
        if on_meta:  # as without a division, for the same seed
            return [
                bool(value.isfinite().all()) and value.std() > 0
                for name, value in found.items()
                if "weight" in name
            ]
        return (
            gather_object(where, {name: value.tolist() for name, value in expected.items()})[0]
            == everywhere[0]
        )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_models_that_were_built_differently_begin_with_rank_0s_weights(run_ranks, kind: str) -> None:
    assert run_ranks(first_values, kind, "data 2 x tensor 2", False, num_processes=4) == [True] * 4


def test_layers_on_meta_are_initialised_before_they_are_divided(run_ranks) -> None:
    found = run_ranks(first_values, "fsdp", "shard 2 x tensor 2", True, num_processes=4)
    assert found[0] == [True, False, True, True]  # the embedding, the norm of ones, and the two layers


def writes(kind: str, mesh: str) -> None:
    with context(parallelism=ParallelDims(**_sizes(mesh), tensor_styles=STYLES)) as where:
        torch.manual_seed(0)
        model = Perceptron()
        backend, one = prepared(where, kind, model, SGD(model.parameters(), lr=0.1))
        with one.gathered(write=True):
            assert model.layers[0].weight.shape == (3, 6)
            assert model.words.weight.shape == (5, 6)
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.fill_(number + where.topology.rank)
        expected = {name: float(number) for number, (name, _) in enumerate(model.named_parameters())}
        found = full_model(one, where, everywhere=True)
        assert {name: value.unique().tolist() for name, value in found.items()} == {
            name: [value] for name, value in expected.items()
        }
        given = {name: torch.randn(value.shape) for name, value in found.items()}
        load_full_state_dict(one, given if where.topology.is_main else None, where)
        loaded = full_model(one, where)
        if where.topology.is_main:
            assert all(torch.equal(loaded[name], given[name]) for name in given)
        backend.close()


def _sizes(mesh: str) -> dict[str, int | None]:
    return {name: getattr(MESHES[mesh], name) for name in ("data", "shard", "tensor")}


@pytest.mark.parametrize(
    ("kind", "mesh"), [("single", "tensor 2"), ("ddp", "data 2 x tensor 2"), ("fsdp", "shard 2 x tensor 2")]
)
@pytest.mark.default_cases("single", "fsdp")
def test_whole_tensors_are_gathered_written_and_loaded(run_ranks, kind: str, mesh: str) -> None:
    run_ranks(writes, kind, mesh, num_processes=NUM_RANKS.get(mesh, 4))


def one_bad_part() -> list[object]:
    """Step on gradients of which one rank's part holds a NaN, then save after one rank has written a whole weight."""
    with context(parallelism=ParallelDims(tensor=2, tensor_styles=STYLES)) as where:
        torch.manual_seed(0)
        model = Perceptron()
        backend, one = prepared(where, "single", model, SGD(model.parameters(), lr=0.1), on_nonfinite="skip")
        backend.window.begin(is_last=True)
        backend.backward(one.model(TOKENS).square().mean())
        if where.topology.rank == 1:
            model.layers[0].weight.grad.fill_(torch.nan)
        skipped = one.optimizers[0].step()
        one.zero_grad(one.optimizers[0].optimizer)
        if where.topology.rank == 1:
            with torch.no_grad():
                model.norm.weight[2] = 5.0
        with pytest.raises(
            DriftedReplicasError, match=r"norm\.weight of Perceptron differs on ranks 1 from rank 0"
        ):
            one.state_dict()
        backend.close()
        return [skipped, one.optimizers[0].num_steps]


def test_ranks_skip_a_step_together_and_refuse_whole_weights_that_differ(run_ranks) -> None:
    first, second = run_ranks(one_bad_part, num_processes=2)
    assert first == second
    assert first[1] == 0


def refusals() -> list[str]:
    said: list[str] = []
    with context(parallelism=ParallelDims(tensor=2, tensor_styles=STYLES)) as where:
        model = Perceptron()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match="Adafactor cannot step the parts of divided layers") as caught:
            prepared(where, "single", model, Adafactor(model.parameters()))
        said.append(str(caught.value))
    with context(parallelism=ParallelDims(tensor=2)) as where:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        attention = nn.Module()
        attention.query, attention.key = nn.Linear(6, 6), nn.Linear(6, 6)
        with pytest.raises(
            ValueError, match=r"Module has no layer that 2 ranks can divide: .* style"
        ) as caught:
            prepared(where, "single", attention, AdamW(attention.parameters()))
        said.append(str(caught.value))
    return said


def test_what_cannot_be_divided_is_refused_before_anything_changes(run_ranks) -> None:
    first, second = run_ranks(refusals, num_processes=2)
    assert first[1] == second[1]


def edited_alone() -> float:
    """Average edited gradients where the ranks divide one replica, and so have nothing to average."""
    with context(parallelism=ParallelDims(data=1, tensor=2)) as where:
        settings = DDPSettings(reduce="at_close")
        policy = choose_policy("no", where.device)
        backend = DDPBackend(where, policy, window=AccumulationWindow(1), settings=settings)
        model = nn.Linear(1, 1, bias=False)
        backend.prepare([model], [], [])
        backend.backward_alone(model.weight.sum() * (1.0 + where.topology.rank))
        found = model.weight.grad.item()
        backend.close()
        return found


def test_ranks_that_divide_one_replica_average_nothing(run_ranks) -> None:
    assert run_ranks(edited_alone, num_processes=2) == [1.0, 2.0]


def other_batches() -> str:
    """Compute on another batch on each of the ranks that divide the layers, which must read the same."""
    with context(parallelism=ParallelDims(tensor=2, tensor_styles=STYLES)) as where:
        torch.manual_seed(0)
        model = Perceptron()
        backend, one = prepared(where, "single", model, SGD(model.parameters(), lr=0.1))
        backend.window.begin(is_last=True)
        with pytest.raises(ValueError, match="given different inputs") as caught:
            one.model((TOKENS + where.topology.rank).clamp(max=4))
        backend.close()
        return str(caught.value)


class Dropping(nn.Module):
    """A perceptron that drops elements inside the divided layers and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 4)
        self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 4) to (batch, 4)."""
        return self.outside(self.last(self.inside(self.first(x))))


def drops() -> tuple[list[bool], list[list[bool]]]:
    """What ranks drop that have seeded their generators differently: outside of divided layers, and inside."""
    with context(parallelism=ParallelDims(tensor=2)) as where:
        torch.manual_seed(where.topology.rank)
        model = Dropping()
        backend, one = prepared(where, "single", model, SGD(model.parameters(), lr=0.1))
        inside: list[Tensor] = []
        model.inside.register_forward_hook(lambda _, __, output: inside.append(output.detach() == 0))
        backend.window.begin(is_last=True)
        output = one.model(torch.ones(8, 4))
        backend.backward(output.sum())
        one.optimizers[0].step()  # which would refuse whole weights that differ
        backend.close()
        return (output == 0).flatten().tolist(), gather_object(where, inside[0].flatten().tolist())


def test_ranks_drop_the_same_outside_divided_layers_and_others_inside(run_ranks) -> None:
    (first, (here, there)), (second, _) = run_ranks(drops, num_processes=2)
    assert first == second
    assert True in first
    assert here != there


def test_ranks_that_read_other_batches_are_told_at_the_first_forward(run_ranks) -> None:
    first, second = run_ranks(other_batches, num_processes=2)
    assert first.startswith("ranks 0, 1 divide Perceptron")
    assert first == second


def other_numbers() -> str:
    """Step where a program has one rank draw other numbers outside the divided layers."""
    with context(parallelism=ParallelDims(tensor=2)) as where:
        model = nn.Sequential(Dropping(), nn.LayerNorm(4))
        backend, one = prepared(where, "single", model, SGD(model.parameters(), lr=0.1))
        torch.manual_seed(where.topology.rank)
        backend.window.begin(is_last=True)
        backend.backward(one.model(torch.ones(8, 4)).square().mean())
        with pytest.raises(DriftedReplicasError) as caught:
            one.optimizers[0].step()
        backend.close()
        return str(caught.value)


def test_ranks_that_draw_other_numbers_are_told_at_the_first_step(run_ranks) -> None:
    first, second = run_ranks(other_numbers, num_processes=2)
    assert "differs on ranks 1 from rank 0" in first
    assert first == second


class Words(Perceptron):
    """A perceptron with a head over its words."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) tokens to (batch, length, 5)."""
        return self.head(super().forward(tokens))


def looks(kind: str) -> str:
    """Train on logits that stay divided, then look at other logits on each rank."""
    styles = {**STYLES, "head": "vocabulary_column"}
    with context(parallelism=ParallelDims(tensor=2, tensor_styles=styles)) as where:
        torch.manual_seed(0)
        model = Words()
        backend, one = prepared(where, kind, model, SGD(model.parameters(), lr=0.1))
        backend.window.begin(is_last=True)
        backend.backward(nn.functional.cross_entropy(one.model(TOKENS).flatten(0, 1), TOKENS.flatten()))
        one.optimizers[0].step()
        logits = [one.model(TOKENS), one.model(TOKENS)]
        with pytest.raises(RuntimeError) as caught:
            logits[where.topology.rank].argmax(-1)
        backend.close()
        return str(caught.value)


def test_ranks_that_look_at_other_logits_are_told_so(run_ranks) -> None:
    for number, said in enumerate(run_ranks(looks, "single", num_processes=2)):
        assert said.startswith("argmax() asks on this rank for the whole of what each rank holds a part of")
        assert f"(head, call {number + 1})" in said
