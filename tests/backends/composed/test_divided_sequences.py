"""Models whose sequences ranks divide train as whole ones under every strategy."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drivetrain_backends import BackendContract, DDPBackend, FSDPBackend, SingleBackend
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_precision import choose_policy
from drivetrain_state import ParallelDims
from plain_loop.backends import context
from sequence_layer import RoutedLayer, SequenceLayer
from sequence_words import Words, loss_of, tokens_of

BACKENDS = {"ddp": DDPBackend, "fsdp": FSDPBackend, "single": SingleBackend}
MESHES = {
    "context 2": ParallelDims(context=2),
    "context 3": ParallelDims(context=3),
    "data 2 x context 2": ParallelDims(data=2, context=2),
    "shard 2 x context 2": ParallelDims(shard=2, context=2),
    "context 2 x tensor 2": ParallelDims(context=2, tensor=2),
    "context 2 x expert 2": ParallelDims(context=2, expert=2),
    "tensor 2": ParallelDims(tensor=2, sequence=True),
    "shard 2 x tensor 2": ParallelDims(shard=2, tensor=2, sequence=True),
}
TESTS = Path(__file__).parents[2]
NUM_RANKS = {"context 2": 2, "context 3": 3, "context 2 x expert 2": 2, "tensor 2": 2}
CASE = "mean, accumulated, clipped, a short last window"


def contract(kind: str, mesh: str, is_whole: bool) -> None:
    class Contract(BackendContract):
        backend = BACKENDS[kind]
        layer = RoutedLayer if "expert" in mesh else SequenceLayer

    with context(parallelism=MESHES[mesh]) as where:
        if is_whole:
            Contract().check_all(where)
        else:
            Contract().check_case(where, CASE, Contract.cases[CASE])


@pytest.mark.parametrize("is_whole", [False, True], ids=["one case", "whole"])
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("ddp", "context 2"),
        ("fsdp", "context 2"),
        ("ddp", "context 3"),
        ("ddp", "data 2 x context 2"),
        ("fsdp", "shard 2 x context 2"),
        ("ddp", "context 2 x tensor 2"),
        ("fsdp", "context 2 x tensor 2"),
        ("fsdp", "context 2 x expert 2"),
        ("single", "tensor 2"),
        ("fsdp", "shard 2 x tensor 2"),
    ],
)
@pytest.mark.default_cases("ddp-context 2-one case", "single-tensor 2-one case")
def test_the_contract_holds_on_divided_sequences(run_ranks, kind: str, mesh: str, is_whole: bool) -> None:
    run_ranks(contract, kind, mesh, is_whole, num_processes=NUM_RANKS.get(mesh, 4), timeout_seconds=170)


def losses(mesh: str, compiles: bool) -> list[float]:
    with context(parallelism=MESHES[mesh]) as where:
        torch.manual_seed(0)
        model = SequenceLayer(6, 6)
        backend = DDPBackend(where, choose_policy("no", where.device), window=AccumulationWindow())
        (prepared,) = backend.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)], [])
        call = torch.compile(prepared.model, backend="aot_eager") if compiles else prepared.model
        found: list[float] = []
        for _ in range(3):
            loss = call(torch.linspace(-1, 1, 12).view(2, 6)).square().mean()
            prepared.backward(loss)
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
            found.append(loss.item())
        backend.close()
        return found


@pytest.mark.parametrize("mesh", ["context 2", "tensor 2"])
@pytest.mark.slow
def test_a_compiled_model_trains_as_the_eager_one(run_ranks, mesh: str) -> None:
    eager, compiled = (
        run_ranks(losses, mesh, compiles, num_processes=2, timeout_seconds=170) for compiles in (False, True)
    )
    assert compiled == [pytest.approx(one, rel=1e-6) for one in eager]


def language_losses(kind: str, mesh: str | None) -> tuple[list[float], str]:
    """Train a language model for some steps, and return its losses and the class of its logits."""
    styles = {"head": "vocabulary_column"} if mesh and "tensor" in mesh else None
    parallelism = replace(MESHES[mesh], tensor_styles=styles) if mesh else None
    with context(parallelism=parallelism) as where:
        torch.manual_seed(0)
        model = Words().double()
        backend = BACKENDS[kind](where, choose_policy("no", where.device), window=AccumulationWindow())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        (prepared,) = backend.prepare([model], [optimizer], [])
        losses: list[float] = []
        kinds: set[str] = set()
        for step in range(3):
            tokens = tokens_of(step)
            logits = prepared.model(tokens)
            kinds.add(type(logits).__name__)
            loss = loss_of(logits, tokens)
            prepared.backward(loss)
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
            losses.append(loss.item())
        backend.close()
        return losses, kinds.pop()


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("ddp", "context 2"),
        ("fsdp", "context 2"),
        ("ddp", "context 2 x tensor 2"),
        ("fsdp", "context 2 x tensor 2"),
    ],
)
@pytest.mark.default_cases("ddp-context 2")
def test_a_language_model_trains_without_logits_of_all_positions(run_ranks, kind: str, mesh: str) -> None:
    expected, _ = language_losses("single", None)
    for losses, made in run_ranks(
        language_losses, kind, mesh, num_processes=NUM_RANKS.get(mesh, 4), timeout_seconds=170
    ):
        assert losses == [pytest.approx(one, rel=1e-9) for one in expected]
        assert made == "DividedTensor"


def looked_at_alone() -> str:
    with context(parallelism=MESHES["context 2"], timeout_seconds=2) as where:
        model = Words()
        backend = DDPBackend(where, choose_policy("no", where.device), window=AccumulationWindow())
        (prepared,) = backend.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)], [])
        logits, said = prepared.model(tokens_of(0)), ""
        if where.topology.rank == 0:
            with pytest.raises(RuntimeError) as caught:
                logits.argmax(-1)
            said = str(caught.value)
        prepared.backward(loss_of(logits, tokens_of(0)))
        backend.close()
        return said


@pytest.mark.slow
def test_a_rank_that_looks_alone_is_told_so_and_disturbs_no_step(run_ranks) -> None:
    said, nothing = run_ranks(looked_at_alone, num_processes=2)
    assert said.startswith("argmax() asks on this rank for the whole")
    assert nothing == ""


def given_other_shapes() -> str:
    with context(parallelism=MESHES["context 2"]) as where:
        model = SequenceLayer(6, 6)
        backend = DDPBackend(where, choose_policy("no", where.device), window=AccumulationWindow())
        (prepared,) = backend.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)], [])
        with pytest.raises(
            ValueError, match="ranks 0, 1 divide SequenceLayer, and were given different"
        ) as found:
            prepared.model(torch.zeros(2 + where.topology.rank, 6))  # of one sum of bits
        return str(found.value)


def test_inputs_of_other_shapes_are_refused_on_every_rank(run_ranks) -> None:
    assert len(set(run_ranks(given_other_shapes, num_processes=2))) == 1


def beside_a_whole_model() -> list[float]:
    with context(parallelism=MESHES["context 2"]) as where:
        backend = DDPBackend(where, choose_policy("no", where.device), window=AccumulationWindow())
        torch.manual_seed(0)
        other = torch.nn.Linear(6, 1)
        with pytest.raises(
            ValueError, match=r"Linear has no nn\.ModuleList .* together with a model that has"
        ):
            backend.prepare([other], [], [])
        model = SequenceLayer(6, 6)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        (prepared, second) = backend.prepare([model, other], [optimizer], [])
        for _ in range(2):
            backend.backward(
                second.model(prepared.model(torch.linspace(-1, 1, 12).view(2, 6))).square().mean()
            )
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
        return [p.sum().item() for p in (*model.parameters(), *other.parameters())]


def test_a_model_without_blocks_stays_whole_beside_one_that_has_them(run_ranks) -> None:
    torch.manual_seed(0)
    other, model = torch.nn.Linear(6, 1), SequenceLayer(6, 6)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    for _ in range(2):
        other(model(torch.linspace(-1, 1, 12).view(2, 6))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [p.sum().item() for p in (*model.parameters(), *other.parameters())]
    for found in run_ranks(beside_a_whole_model, num_processes=2):
        assert found == [pytest.approx(one, rel=1e-5, abs=1e-6) for one in expected]


def given_other_models(mesh: str) -> None:
    with context(parallelism=MESHES[mesh]) as where:
        torch.manual_seed(0)
        num_layers = 2 + where.topology.rank
        inner = [SequenceLayer(6, 6) for _ in range(num_layers)]
        backend = DDPBackend(where, choose_policy("no", where.device), window=AccumulationWindow())
        with pytest.raises(ValueError, match="ranks 0, 1 would divide Sequential in different ways"):
            backend.prepare([torch.nn.Sequential(*inner)], [], [])


@pytest.mark.parametrize("mesh", ["context 2", "tensor 2"])
def test_models_that_differ_among_ranks_are_refused_on_all_of_them(run_ranks, mesh: str) -> None:
    run_ranks(given_other_models, mesh, num_processes=2)


STAYS_AWAY = """
import time
import torch
from sequence_layer import SequenceLayer
from drivetrain_backends import AccumulationWindow, DDPBackend
from drivetrain_precision import choose_policy
from drivetrain_state import ParallelDims, StateSettings, connect
settings = StateSettings(device="cpu", hang_timeout_seconds=4, timeout_seconds=15)
context = connect(settings, parallelism=ParallelDims(context=2))
backend = DDPBackend(context, choose_policy("no", context.device), window=AccumulationWindow())
model = SequenceLayer(6, 6)
(prepared,) = backend.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)], [])
for step in range(3):
    if step == 2 and context.topology.rank == 1:
        time.sleep(25)  # in a step that the other rank begins
    prepared.backward(prepared.model(torch.ones(2, 6)).sum())
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()
"""


@pytest.mark.slow
def test_a_rank_that_stays_away_from_a_divided_sequence_is_named(run_ranks_script, tmp_path) -> None:
    begin = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.path.insert(0, {str(TESTS)!r})\n"
    zero, _ = run_ranks_script(begin + STAYS_AWAY, fresh=True)
    assert zero.returncode in (1, 124)  # gloo's limit ends the rank, or the watchdog's
    assert "likely culprit: rank 1" in zero.stderr
    assert "Block.forward  all_to_all_single" in zero.stderr
