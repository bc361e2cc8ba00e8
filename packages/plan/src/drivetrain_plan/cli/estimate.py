"""Estimate the memory that training a model takes."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from drivetrain_dispatch.cli.huggingface import whole_classes
from drivetrain_dispatch.errors import CostError
from drivetrain_messages import format_size, format_table
from drivetrain_plan.choice import PlanChoice, Strategy
from drivetrain_plan.cli.estimate_arguments import EstimateArguments
from drivetrain_plan.model.huggingface import build_to_train
from drivetrain_plan.model.layers import num_blocks
from drivetrain_plan.model.source import BuiltSource, ConfigSource
from drivetrain_plan.model.training_modes import MODES, TrainingMode
from drivetrain_plan.model.weight_sizes import WeightSizes, sizes_of_files, sizes_of_model
from drivetrain_plan.planner import run_extrapolated
from drivetrain_plan.program.rank_step import run_rank
from drivetrain_plan.search.memory import divided_by_stage, memory_of
from drivetrain_weights import WeightFilesError

TOPIC = "Plan"  # in `drivetrain --help`

_STRATEGIES: Mapping[str, Strategy] = {
    "ddp": "none",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp": "full_shard",
}
# The bytes of a mode by what they are, or why they are not told.
_Estimate: TypeAlias = Mapping[str, int] | str
_USAGE = 2  # exit code of a command that cannot be carried out


def run(arguments: EstimateArguments) -> int:
    """Estimate the memory of training a Hugging Face model, by dtype and by way to train."""
    try:
        path = Path(arguments.model).expanduser()
        if path.name == "config.json" or (path / "config.json").is_file() or not path.exists():
            model = build_to_train(path, dtype=None)
            weights = sizes_of_model(model, whole_classes(model))
            estimates: dict[str, _Estimate] = {}
            for name in arguments.mode:
                try:
                    estimates[name] = _estimate(path, MODES[name], weights, arguments)
                except (CostError, ImportError) as error:
                    estimates[name] = str(error)
        else:
            why = "the files of weights alone do not say what a step computes: add config.json"
            weights = sizes_of_files(path)
            estimates = dict.fromkeys(arguments.mode, why)
    except (ValueError, ImportError, OSError, CostError, WeightFilesError) as error:
        sys.stderr.write(f"drivetrain: error: {' '.join(str(error).split())}\n")
        return _USAGE
    if not arguments.json:
        sys.stdout.write(f"{_as_text(arguments, weights, estimates)}\n")
        return 0
    described = {
        "model": weights.model,
        "parameters": weights.num_parameters,
        "largest_block": {"name": weights.largest_block, "parameters": weights.largest_block_parameters},
        "weight_bytes": dict(weights.bytes_by_dtype),
        "modes": {
            name: {"error": each} if isinstance(each, str) else each for name, each in estimates.items()
        },
    }
    sys.stdout.write(f"{json.dumps(described, indent=2)}\n")
    return 0


def _estimate(
    path: Path, mode: TrainingMode, sizes: WeightSizes, arguments: EstimateArguments
) -> Mapping[str, int]:
    """Return what a process holds of its own program: FSDP's of its shards, others' of the whole model."""
    source = BuiltSource(ConfigSource(path, lora_rank=arguments.lora_rank), mode)
    model = source.build()
    choice = _choice_of(mode, arguments)
    is_sharded = choice.strategy == "full_shard"
    program = choice if is_sharded else PlanChoice(micro_batch=choice.micro_batch)
    if arguments.recompute and mode.trains:
        program = replace(program, checkpointing="full")
    run = partial(
        run_rank,
        source,
        mode=mode,
        num_tokens=arguments.seq,
        optimizer=arguments.optimizer,
        is_sharded=is_sharded,
    )
    figures = run_extrapolated(run, num_blocks(model), program)
    if choice.by_stages:
        block = sizes.largest_block_parameters * (mode.dtype or torch.float32).itemsize
        figures = divided_by_stage(choice, figures, block)
    held = {
        "weights": figures.weights,
        "gradients": figures.gradients,
        "optimizer_states": figures.states,
        "activations": figures.activations,
        "peak": memory_of(choice, figures).peak,
    }
    return {name: round(size_bytes) for name, size_bytes in held.items()}


def _choice_of(mode: TrainingMode, arguments: EstimateArguments) -> PlanChoice:
    number, strategy = arguments.num_processes, _STRATEGIES[arguments.sharding]
    if not mode.trains:  # where there are weights alone to divide
        strategy = "full_shard" if strategy in ("zero3", "full_shard") else "none"
    if strategy == "none" or number == 1:
        return PlanChoice(data=number, micro_batch=arguments.batch)
    return PlanChoice(shard=number, strategy=strategy, micro_batch=arguments.batch)


def _as_text(arguments: EstimateArguments, weights: WeightSizes, estimates: Mapping[str, _Estimate]) -> str:
    held = "   ".join(f"{name} {format_size(size)}" for name, size in weights.bytes_by_dtype.items())
    recompute = ", activations computed again" if arguments.recompute else ""
    of_each = f"; each of {arguments.num_processes} processes, {arguments.sharding}"
    ranks = of_each if arguments.num_processes > 1 else ""
    lines = [
        f"{weights.model}: {weights.num_parameters:,} parameters",
        f"weights        {held}",
        f"largest block  {weights.largest_block}, {weights.largest_block_parameters:,} parameters",
        "",
        f"a step of {arguments.batch} x {arguments.seq} tokens, {arguments.optimizer}{recompute}{ranks}",
    ]
    told = {name: each for name, each in estimates.items() if not isinstance(each, str)}
    rows = [
        ("mode", *(column.replace("_", " ") for column in next(iter(told.values()), {}))),
        *((name, *map(format_size, each.values())) for name, each in told.items()),
    ]
    if told:
        lines += [format_table(rows, right=range(1, len(rows[0]))), ""]
    lines += [f"{name}: {MODES[name].about}" for name in told]
    for reason in dict.fromkeys(each for each in estimates.values() if isinstance(each, str)):
        modes = ", ".join(name for name, each in estimates.items() if each == reason)
        lines.append(f"{modes}: not told: {reason}")
    return "\n".join(lines)
