"""Converted models train to the weights that a plain loop gives the unsplit model of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.flop_counter import FlopCounterMode

from drivetrain import Accelerator
from drivetrain_backends.errors import AccumulationError
from drivetrain_megatron import megatron_from_transformers, transformers_from_megatron
from drivetrain_plan import (
    MODES,
    FactorySource,
    PlanChoice,
    TrainingJob,
    parse_hardware,
    plan_training,
    run_rank,
)
from drivetrain_plan.model.source import BuiltSource
from drivetrain_state import ParallelDims
from megatron_models import config_of, losses_of, model_of, tokens
from megatron_on_cpu import megatron_on_cpu
from plain_loop.accelerated import accelerator_of

NUM_STEPS, CLIP = 6, 0.5


def optimizer_of(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> Tensor:
    return tokens(4, seed=10 + step)


def train_plainly(kind: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, norms and weights of the unsplit model."""
    model = model_of(kind).train()
    optimizer, losses, norms = optimizer_of(model), list[float](), list[float]()
    for step in range(NUM_STEPS):
        ids = batch(step)
        loss = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def start(
    kind: str, parallelism: ParallelDims, options: dict[str, Any], dtype: Any = None, **more: Any
) -> tuple[Any, Any, Any]:
    accelerator = accelerator_of("megatron", parallelism=parallelism, **more)
    model = megatron_from_transformers(model_of(kind).to(dtype).train(), options=options)
    return accelerator, *accelerator.prepare(model, optimizer_of(model))


def own_rows(accelerator: Accelerator, ids: Tensor) -> Tensor:
    reads = accelerator.context.ranks("reads")
    return ids.chunk(reads.size)[reads.index]


def check(kind: str, parallelism: ParallelDims, **options: Any) -> None:
    expected_losses, expected_norms, expected = train_plainly(kind)
    with megatron_on_cpu():
        accelerator, model, optimizer = start(kind, parallelism, options)
        for step in range(NUM_STEPS):
            with accelerator.accumulate(model):
                loss = losses_of(model, own_rows(accelerator, batch(step))).mean()
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
            assert mean == pytest.approx(expected_losses[step], abs=2e-5)
            assert norm.item() == pytest.approx(expected_norms[step], rel=2e-5)
        weights = accelerator.get_state_dict(model, everywhere=True)
        accelerator.end_training()
    back = transformers_from_megatron(weights, config_of(kind))
    for name, parameter in back.named_parameters():
        difference = (parameter - expected[name]).abs().max().item()
        assert difference < 2e-5, f"{name} differs by {difference}"


@pytest.mark.ranks(2, timeout_seconds=170)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral"])
@pytest.mark.default_cases("mixtral")
def test_two_ranks_that_divide_layers_train_as_one_process(kind: str) -> None:
    check(kind, ParallelDims(tensor=2))


@pytest.mark.ranks(2, timeout_seconds=170)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "tied llama"])
@pytest.mark.default_cases("tied llama")
def test_two_ranks_that_divide_sequences_too_train_as_one_process(kind: str) -> None:
    check(kind, ParallelDims(tensor=2), sequence_parallel=True)


def check_planned(choice: PlanChoice, predicted_flops: float) -> None:
    check("llama", choice.dims(), **choice.model_options())
    with megatron_on_cpu():
        accelerator, model, _ = start("llama", choice.dims(), choice.model_options())
        with FlopCounterMode(display=False) as counted:
            accelerator.backward(losses_of(model, batch(0)).mean())
        accelerator.end_training()
    # The rows that pad a vocabulary are computed too.
    assert predicted_flops <= counted.get_total_flops() < 1.5 * predicted_flops


@pytest.mark.slow
def test_a_planned_choice_trains_as_one_process_with_the_products_that_were_predicted(
    run_ranks: Callable[..., list[Any]],
) -> None:
    pins = {"backend": "megatron", "tensor": 2, "checkpointing": "full", "sequence": True}
    built = FactorySource("llama", lambda: model_of("llama"))
    hardware, job = parse_hardware("2x8GB cpu"), TrainingJob(batch=4, pins=pins)
    choice = plan_training(built, hardware, job, MODES["fp32"], num_tokens=12).plans[0].choice
    assert choice.dims() == ParallelDims(tensor=2)
    predicted = run_rank(
        BuiltSource(built, MODES["fp32"], fuses_attention=False), choice, MODES["fp32"], num_tokens=12
    )
    run_ranks(check_planned, choice, predicted.flops, timeout_seconds=150)


@pytest.mark.ranks(2, timeout_seconds=170)
def test_two_replicas_train_as_one_process() -> None:
    check("llama", ParallelDims(data=2))


@pytest.mark.slow
@pytest.mark.ranks(4, timeout_seconds=170)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_two_replicas_of_divided_layers_train_as_one_process(kind: str) -> None:
    check(kind, ParallelDims(data=2, tensor=2))


@pytest.mark.slow
@pytest.mark.ranks(4, timeout_seconds=170)
def test_four_ranks_that_divide_layers_train_as_one_process() -> None:
    check("gpt2", ParallelDims(tensor=4))


def check_stages(kind: str, parallelism: ParallelDims) -> None:
    expected_losses, expected_norms, expected = train_plainly(kind)
    with megatron_on_cpu():
        accelerator, model, _ = start(kind, parallelism, {})
        for step in range(NUM_STEPS):
            result = accelerator.train_step(
                {"ids": own_rows(accelerator, batch(step))},
                loss=lambda model, piece: losses_of(model, piece["ids"]).mean(),
                max_norm=CLIP,
            )
            mean = accelerator.gather(result.loss.detach().float().reshape(1)).mean().item()
            assert mean == pytest.approx(expected_losses[step], abs=2e-5)
            assert result.grad_norm.item() == pytest.approx(expected_norms[step], rel=2e-5)
        with pytest.raises(AccumulationError, match=r"call accelerator\.train_step"):
            losses_of(model, batch(0))
        weights = accelerator.get_state_dict(model, everywhere=True)
        accelerator.end_training()
    back = transformers_from_megatron(weights, config_of(kind))
    for name, parameter in back.named_parameters():
        difference = (parameter - expected[name]).abs().max().item()
        assert difference < 2e-5, f"{name} differs by {difference}"


@pytest.mark.ranks(2, timeout_seconds=170)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.default_cases("llama")
def test_two_stages_train_as_one_process(kind: str) -> None:
    check_stages(kind, ParallelDims(pipeline=2))


def train_batch(accelerator: Accelerator, step: int) -> float:
    result = accelerator.train_step(
        {"ids": batch(step)}, loss=lambda model, piece: losses_of(model, piece["ids"]).mean(), max_norm=CLIP
    )
    return result.loss.item()


@pytest.mark.ranks(2, timeout_seconds=170)
def test_two_stages_send_what_they_compute_in_half_precision() -> None:
    expected, _, _ = train_plainly("llama")
    with megatron_on_cpu():
        accelerator, *_ = start("llama", ParallelDims(pipeline=2), {}, dtype=torch.bfloat16)
        losses = [train_batch(accelerator, step) for step in range(NUM_STEPS)]
        accelerator.end_training()
        assert losses == pytest.approx(expected, abs=5e-2)
        # Megatron's layers follow autocast in backward on CUDA alone: here, what a stage is to send.
        accelerator, model, _ = start("llama", ParallelDims(pipeline=2), {}, mixed_precision="bf16")
        assert accelerator.unwrap_model(model).config.pipeline_dtype == torch.bfloat16
        accelerator.end_training()


@pytest.mark.ranks(2, timeout_seconds=170)
def test_a_model_in_stages_is_prepared_again_by_another_accelerator() -> None:
    with megatron_on_cpu():
        model = None
        for _ in range(2):
            accelerator = accelerator_of("megatron", parallelism=ParallelDims(pipeline=2))
            model = model or megatron_from_transformers(model_of("llama").train())
            accelerator.prepare(model, optimizer_of(model))
            train_batch(accelerator, 0)
            accelerator.free_memory()
            accelerator.prepare(model, optimizer_of(model))
            train_batch(accelerator, 0)
            accelerator.end_training()


@pytest.mark.slow
@pytest.mark.ranks(4, timeout_seconds=170)
@pytest.mark.parametrize("axis", ["tensor", "data"])
def test_two_stages_of_divided_or_replicated_layers_train_as_one_process(axis: str) -> None:
    check_stages("llama", ParallelDims(pipeline=2, **{axis: 2}))
