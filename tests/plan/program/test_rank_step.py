from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import CostError
from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.model.layers import num_blocks
from drivetrain_plan.model.source import BuiltSource, ModuleSource, find_source
from drivetrain_plan.model.training_modes import MODES
from drivetrain_plan.planner import run_extrapolated
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.program.rank_step import run_rank
from drivetrain_plan.program.tally import StepTally
from planned_models import llama_source

TOKENS, BATCH = 32, 2
WIDTH, ROWS = 64, 16
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # the bytes of a linear layer
ACTIVATION = ROWS * WIDTH * 4  # those of its inputs, or outputs
WHOLE = PlanChoice(micro_batch=BATCH)


def figures(source: BuiltSource, choice: PlanChoice, mode: str = "fp32") -> StepFigures:
    return run_rank(source, choice, MODES[mode], num_tokens=TOKENS, optimizer="adamw-loop")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> BuiltSource:
    pytest.importorskip("transformers")
    return BuiltSource(llama_source(tmp_path_factory.mktemp("llama")), MODES["fp32"])


@pytest.fixture(scope="module")
def whole(source: BuiltSource) -> StepFigures:
    """The figures of the undivided model."""
    return figures(source, WHOLE)


def test_the_peak_of_a_step_is_what_a_real_one_allocates(whole: StepFigures, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    llama_source(tmp_path)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(tmp_path)).train()
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tally = StepTally()
    states = [one for kept in optimizer.state.values() for one in kept.values()]
    with tally:
        tally.add((*model.parameters(), *model.buffers(), *states, ids))
        tally.restart()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        del loss
        optimizer.step()
    assert whole.peak == pytest.approx(tally.peak_bytes, rel=0.01)
    assert whole.flops == tally.flops


def test_tokens_are_multiplied_by_each_expert_that_they_choose(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    flops: list[float] = []
    for number in (1, 2):
        config = transformers.MixtralConfig(
            architectures=["MixtralForCausalLM"], hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, vocab_size=64, num_local_experts=4,
            num_experts_per_tok=number, use_cache=False,
        )  # fmt: skip
        config.save_pretrained(tmp_path / str(number))
        flops.append(
            figures(BuiltSource(find_source(str(tmp_path / str(number))), MODES["fp32"]), WHOLE).flops
        )
    # Gate, up and down, in forward and twice in backward.
    assert flops[1] - flops[0] == 2 * 3 * BATCH * TOKENS * (3 * 32 * 64)


def test_sharded_parameters_are_gathered_twice_and_reduced_once(
    source: BuiltSource, whole: StepFigures
) -> None:
    half = figures(source, PlanChoice(micro_batch=BATCH, shard=2, strategy="full_shard"))
    eighth = figures(source, PlanChoice(micro_batch=BATCH, shard=8, strategy="full_shard"))
    assert half.weights == pytest.approx(whole.weights / 2, rel=0.01)
    assert eighth.gradients == pytest.approx(whole.gradients / 8, rel=0.01)
    assert eighth.computing == pytest.approx(half.computing, rel=0.05)  # gathered blocks are whole
    assert half.payloads["fsdp", "reduce_scatter"] == whole.gradients
    # All of it forward, and what is not the root's backward.
    assert whole.weights < half.payloads["fsdp", "all_gather"] < 2 * whole.weights
    kept = figures(source, PlanChoice(micro_batch=BATCH, shard=2, strategy="shard_grad_op"))
    assert kept.payloads["fsdp", "all_gather"] == pytest.approx(whole.weights, rel=0.01)
    assert kept.forward > half.forward


def test_divided_layers_add_up_four_times_a_block(source: BuiltSource, whole: StepFigures) -> None:
    """Two sums forward and two backward, each of the hidden states; and those of the embedding and the loss."""
    found = figures(source, PlanChoice(micro_batch=BATCH, tensor=2))
    hidden = BATCH * TOKENS * 64 * 4
    assert found.payloads["tensor", "all_reduce"] == pytest.approx((4 * 3 + 2) * hidden, rel=0.01)
    assert found.weights < 0.55 * whole.weights


def test_divided_sequences_halve_activations_and_not_weights(source: BuiltSource, whole: StepFigures) -> None:
    found = figures(source, PlanChoice(micro_batch=BATCH, context=2))
    assert found.weights == whole.weights
    assert found.activations == pytest.approx(whole.activations / 2, rel=0.1)


@pytest.mark.slow
def test_recomputation_keeps_the_inputs_of_blocks(source: BuiltSource) -> None:
    ways = {
        kind: figures(
            source, PlanChoice(micro_batch=BATCH, shard=2, strategy="full_shard", checkpointing=kind)
        )
        for kind in ("none", "selective", "full")
    }
    assert ways["full"].activations < ways["none"].activations / 3
    assert ways["full"].activations < ways["selective"].activations < ways["none"].activations
    assert ways["selective"].flops == ways["none"].flops
    assert ways["full"].flops > 1.2 * ways["none"].flops


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(WHOLE, id="whole"),
        pytest.param(PlanChoice(micro_batch=BATCH, shard=4, strategy="full_shard"), id="fsdp"),
        pytest.param(PlanChoice(micro_batch=BATCH, tensor=2, sequence=True), id="tensor"),
        pytest.param(
            PlanChoice(micro_batch=BATCH, shard=4, strategy="full_shard", checkpointing="full"),
            id="recomputed",
        ),
    ],
)
def test_a_few_blocks_tell_of_all(tmp_path: Path, choice: PlanChoice) -> None:
    pytest.importorskip("transformers")
    source = BuiltSource(llama_source(tmp_path, num_hidden_layers=7), MODES["fp32"])
    run = partial(run_rank, source, mode=MODES["fp32"], num_tokens=TOKENS, optimizer="adamw-loop")
    found = run_extrapolated(run, num_blocks(source.build()), choice)
    whole = figures(source, choice)
    assert found.peak == pytest.approx(whole.peak, rel=0.02)
    assert found.weights == whole.weights
    assert found.payloads == pytest.approx(whole.payloads)


def test_a_model_in_hand_keeps_its_values_and_gets_no_hooks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    before = [parameter.clone() for parameter in model.parameters()]
    given = BuiltSource(ModuleSource(model, lambda batch, _: {"input": torch.zeros(batch, 4)}), MODES["fp32"])
    found = figures(given, PlanChoice(micro_batch=3))
    assert found.weights == 4 * 2 * (16 + 4)
    assert all(map(torch.equal, before, model.parameters()))
    assert not any(one._forward_hooks or one._backward_hooks for one in model.modules())


class Stack(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class SummedSource(ModuleSource):
    """A model whose loss is the sum of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, lambda batch, _: {"x": torch.empty(batch, WIDTH)})

    def loss_of(self, outputs: Any) -> Tensor:
        return outputs.sum()


def stepped(model: nn.Module, *, optimizer: str = "adamw-loop", mode: str = "fp32") -> StepFigures:
    source = BuiltSource(SummedSource(model), MODES[mode])
    return run_rank(source, PlanChoice(micro_batch=ROWS), MODES[mode], num_tokens=1, optimizer=optimizer)


def test_weights_gradients_states_and_the_batch_are_counted_to_the_byte() -> None:
    step = stepped(Stack())
    assert step.weights == step.gradients == 4 * LAYER
    steps = 8 * 4  # AdamW's count of steps, a number for each of 8 parameters
    assert step.states == 2 * 4 * LAYER + steps
    assert step.inputs == ACTIVATION


def test_activations_are_what_the_forward_leaves() -> None:
    # ReLU saves its output, which is the next layer's input; the loss is a number.
    assert stepped(Stack()).activations == 4 * ACTIVATION + 4


def test_the_peak_of_plain_layers_is_that_of_real_tensors_to_the_byte() -> None:
    model, x = Stack(), torch.ones(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tally = StepTally()
    with tally:
        tally.add((*model.parameters(), x))
        for number in range(2):
            if number:
                tally.restart()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert stepped(Stack()).peak == tally.peak_bytes


def test_operations_over_all_parameters_hold_temporary_results_of_all() -> None:
    loop, foreach = stepped(Stack()), stepped(Stack(), optimizer="adamw")
    assert foreach.stepping - foreach.gradients >= 4 * LAYER > loop.stepping - loop.gradients
    assert foreach.states == loop.states


def test_sgd_keeps_nothing_and_momentum_a_copy() -> None:
    assert stepped(Stack(), optimizer="sgd").states == 0
    assert stepped(Stack(), optimizer="sgd-momentum").states == 4 * LAYER


def test_autocast_saves_halves_and_the_cast_weights() -> None:
    step = stepped(Stack(), mode="mixed")
    assert step.weights == 4 * LAYER
    casts = 4 * LAYER // 2
    assert casts <= step.activations <= casts + 5 * ACTIVATION // 2 + 8


def test_frozen_weights_get_no_gradients_and_tied_ones_count_once() -> None:
    model = Stack()
    model.requires_grad_(False)
    model.layers[3].requires_grad_(True)
    model.layers[1].weight = model.layers[0].weight  # type: ignore[union-attr]
    step = stepped(model)
    assert step.weights == 4 * LAYER - WIDTH * WIDTH * 4
    assert step.gradients == LAYER


def test_a_forward_alone_holds_no_activations() -> None:
    forward = stepped(Stack(10), mode="inference")
    assert forward.peak == forward.weights + forward.inputs + forward.forward
    assert forward.forward <= 3 * ACTIVATION
    assert (forward.activations, forward.states) == (0, 0)


class Choosing(Stack):
    """A forward that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if found.sum() > 0 else x


def test_a_forward_that_depends_on_values_is_named() -> None:
    with pytest.raises(CostError, match="Choosing: its forward depends on the values of tensors"):
        stepped(Choosing())
