"""Estimate the memory that training a Hugging Face model takes, by dtype and by way to train. Nothing is loaded."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from drivetrain_dispatch.cli.huggingface import whole_classes
from drivetrain_dispatch.errors import CostError
from drivetrain_messages import argument, format_size, format_table
from drivetrain_plan.compat import FakeTensorMode
from drivetrain_plan.model.huggingface import build_to_train, loss_of, training_inputs
from drivetrain_plan.model.training_modes import MODES, OPTIMIZERS, TrainingMode
from drivetrain_plan.model.weight_sizes import WeightSizes, sizes_of_files, sizes_of_model
from drivetrain_plan.program.step_memory import give_fake_tensors, measure_forward, measure_step
from drivetrain_plan.search.rank_memory import SHARDINGS, RankMemory, memory_of_rank
from drivetrain_weights import WeightFilesError

_USAGE = 2  # exit code of a command that cannot be carried out


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateArguments:
    """The arguments of `drivetrain estimate`."""

    model: str = argument(
        ...,
        "Folder of a Hugging Face model, or its config.json; or a file of weights, or their index.",
        positional=True,
    )
    mode: tuple[Literal["inference", "fp32", "mixed", "bf16", "lora"], ...] = argument(
        ("inference", "fp32", "mixed", "bf16", "lora"),
        f"Ways to train, of {', '.join(MODES)}; by default, all of them.",
    )
    batch: int = argument(1, "Number of samples in a step of one process.")
    seq: int = argument(1024, "Number of tokens in a sample.")
    optimizer: Literal["adamw", "adamw-fused", "adamw-loop", "sgd", "sgd-momentum", "adafactor"] = argument(
        "adamw", f"Optimizer: {', '.join(OPTIMIZERS)}; adamw as torch runs it on a GPU."
    )
    recompute: bool = argument(False, "Compute activations again in the backward (activation checkpointing).")
    lora_rank: int = argument(16, "Rank of the adapters of mode lora.")
    num_processes: int = argument(
        1, "Number of processes, each of which computes whole layers and sequences."
    )
    sharding: Literal["ddp", "zero1", "zero2", "zero3", "fsdp"] = argument(
        "fsdp", f"What processes divide among them: {', '.join(SHARDINGS)}."
    )
    json: bool = argument(False, "Print JSON, for programs.")

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "lora_rank", "num_processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        for name, values, allowed in (
            ("mode", self.mode, tuple(MODES)),
            ("optimizer", (self.optimizer,), tuple(OPTIMIZERS)),
            ("sharding", (self.sharding,), tuple(SHARDINGS)),
        ):
            if unknown := [value for value in values if value not in allowed]:
                raise ValueError(f"--{name} {unknown[0]}: say one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeEstimate:
    """The estimate of one way to train, or the reason why it is missing."""

    mode: TrainingMode
    memory: RankMemory | None = None
    why_not: str = ""


def run(arguments: EstimateArguments) -> int:
    """Estimate the memory of training a Hugging Face model, by dtype and by way to train."""
    try:
        path = Path(arguments.model).expanduser()
        if path.name == "config.json" or (path / "config.json").is_file() or not path.exists():
            model = build_to_train(path, dtype=None)
            weights = sizes_of_model(model, whole_classes(model))
            estimates = [_estimate(path, MODES[name], weights, arguments) for name in arguments.mode]
        else:
            why = "the files of weights alone do not say what a step computes: add config.json"
            weights = sizes_of_files(path)
            estimates = [ModeEstimate(mode=MODES[name], why_not=why) for name in arguments.mode]
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
            each.mode.name: {"error": each.why_not} if each.memory is None else asdict(each.memory)
            for each in estimates
        },
    }
    sys.stdout.write(f"{json.dumps(described, indent=2)}\n")
    return 0


def _estimate(
    path: Path, mode: TrainingMode, sizes: WeightSizes, arguments: EstimateArguments
) -> ModeEstimate:
    rank = arguments.lora_rank if mode.is_lora else None
    try:
        recompute = arguments.recompute and mode.trains
        model = build_to_train(path, dtype=mode.dtype, lora_rank=rank, recompute=recompute)
        with FakeTensorMode():
            give_fake_tensors(model)
            inputs = training_inputs(model, arguments.batch, arguments.seq)
            optimizer = OPTIMIZERS[arguments.optimizer]
            step = (
                measure_step(model, inputs, loss_of=loss_of, make_optimizer=optimizer, autocast=mode.autocast)
                if mode.trains
                else measure_forward(model.eval(), inputs)
            )
    except (CostError, ImportError) as error:
        return ModeEstimate(mode=mode, why_not=str(error))
    itemsize = torch.float32.itemsize if mode.dtype is None else mode.dtype.itemsize
    memory = memory_of_rank(
        step,
        sharding=SHARDINGS[arguments.sharding],
        world_size=arguments.num_processes,
        largest_block_bytes=sizes.largest_block_parameters * itemsize,
    )
    return ModeEstimate(mode=mode, memory=memory)


def _as_text(arguments: EstimateArguments, weights: WeightSizes, estimates: Sequence[ModeEstimate]) -> str:
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
    names = ("weights", "gradients", "optimizer states", "activations", "gathered", "peak")
    shown = [name for name in names if name != "gathered" or arguments.num_processes > 1]
    rows = [("mode", *shown)]
    for each in estimates:
        if each.memory is not None:
            sizes = asdict(each.memory)
            cells = (format_size(sizes[name.replace(" ", "_")]) for name in shown)
            rows.append((each.mode.name, *cells))
    if len(rows) > 1:
        lines += [format_table(rows, right=range(1, len(rows[0]))), ""]
    lines += [f"{each.mode.name}: {each.mode.about}" for each in estimates if each.memory is not None]
    for reason in dict.fromkeys(each.why_not for each in estimates if each.memory is None):
        modes = ", ".join(each.mode.name for each in estimates if each.why_not == reason)
        lines.append(f"{modes}: not told: {reason}")
    return "\n".join(lines)
