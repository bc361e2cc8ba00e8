"""Plan the devices of a model that is too large for one."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from drivetrain_dispatch.cli.forecast import Forecast, forecast
from drivetrain_dispatch.cli.huggingface import (
    build_empty,
    most_tokens,
    prompt_of,
    token_after,
    whole_classes,
)
from drivetrain_dispatch.cli.plan_arguments import PlanArguments
from drivetrain_dispatch.errors import CostError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.blocks import blocks_of
from drivetrain_dispatch.planning.cost_model import ComputeRate, measure_costs
from drivetrain_dispatch.planning.device_map import Device, Tier, tier_of
from drivetrain_dispatch.planning.hardware import described, hardware_of
from drivetrain_dispatch.planning.infer_device_map import split_budgets
from drivetrain_dispatch.planning.memory_budget import get_max_memory
from drivetrain_dispatch.planning.pipeline_model import Bandwidths
from drivetrain_dispatch.quantization.libraries import BitsAndBytes4Bit, BitsAndBytes8Bit, TorchAO
from drivetrain_dispatch.quantization.protocol import Quantization, quantized_sizes
from drivetrain_messages import format_size, format_table, parse_size

TOPIC = "Plan"  # in `drivetrain --help`

_SEQ = 4096  # default number of tokens in a prompt, if the model takes as many
Parsed = TypeVar("Parsed")
_USAGE = 2  # exit code of a command that cannot be carried out
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_QUANTIZATIONS: dict[str, Callable[[], Quantization]] = {
    "bnb-8bit": BitsAndBytes8Bit,
    "bnb-nf4": BitsAndBytes4Bit,
    "bnb-fp4": lambda: BitsAndBytes4Bit(quant_type="fp4"),
    "torchao-int8": lambda: _torchao("Int8WeightOnlyConfig"),
    "torchao-fp8": lambda: _torchao("Float8WeightOnlyConfig"),
}


def run(arguments: PlanArguments) -> int:
    """Plan where a Hugging Face model goes, what each device holds, and how long a token takes."""
    try:
        gpus = [_parse("gpu", text, described) for text in arguments.gpu]
        here: Mapping[Device, int] = {} if gpus and arguments.cpu else get_max_memory()
        budgets: dict[Device, int] = {device: size for device, size in here.items() if device != "cpu"}
        if gpus:
            budgets = dict(enumerate(size for gpu in gpus for size in gpu.sizes))
            budgets = {device: size for device, size in budgets.items() if size}
        budgets["cpu"] = here["cpu"] if arguments.cpu is None else _parse("cpu", arguments.cpu, parse_size)
        on_host = split_budgets(budgets)[0] == ["cpu"]
        usual = hardware_of("cpu" if on_host else next((gpu.kind for gpu in gpus if gpu.kind), "cuda"))
        link = usual.link_bytes_per_second if arguments.link is None else _speed("link", arguments.link)
        rates = Bandwidths(to_device=link, from_disk=_speed("disk", arguments.disk))
        tflops = usual.tflops if arguments.tflops is None else arguments.tflops
        if not tflops > 0:
            raise ValueError(f"--tflops {tflops}: must be above 0")
        given = arguments.bandwidth
        bandwidth = usual.memory_bytes_per_second if given is None else _speed("bandwidth", given)
        rate = ComputeRate(flops_per_second=tflops * 1e12, bytes_per_second=bandwidth)
        dtype = None if arguments.dtype is None else _DTYPES[arguments.dtype]
        model = build_empty(Path(arguments.model_dir).expanduser(), dtype)
        most = most_tokens(model)
        if arguments.seq is not None and most is not None and arguments.seq > most:
            raise ValueError(f"--seq {arguments.seq}: {type(model).__name__} takes {most} tokens at most")
        seq = arguments.seq or min(_SEQ, most or _SEQ)
        arguments = replace(arguments, seq=seq)
        found = _forecast(model, arguments, seq, budgets, rates, rate)
    except (ValueError, ImportError, OSError, CostError) as error:
        sys.stderr.write(f"drivetrain: error: {' '.join(str(error).split())}\n")
        return _USAGE
    if not arguments.json:
        sys.stdout.write(f"{_as_text(model, arguments, found, rate, rates)}\n")
        return 0
    shown = {
        "model": type(model).__name__,
        "dtype": _dtype_of(model),
        "quantize": arguments.quantize,
        "size_bytes": sum(found.device_map.sizes.values()),
        "device_map": dict(found.device_map),
        "devices": {
            str(device): asdict(held) | {"peak_bytes": held.peak_bytes}
            for device, held in found.holdings.items()
        },
        "prefill_seconds": found.prefill_seconds,
        "token_seconds": found.token_seconds,
    }
    sys.stdout.write(f"{json.dumps(shown, indent=2)}\n")
    return 0


def _parse(flag: str, text: str, parse: Callable[[str], Parsed]) -> Parsed:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"--{flag} {text}: {error}") from error


def _speed(flag: str, text: str) -> int:
    if not (speed := _parse(flag, text.removesuffix("/s"), parse_size)):
        raise ValueError(f"--{flag} {text}: must be above 0")
    return speed


def _forecast(
    model: nn.Module,
    arguments: PlanArguments,
    seq: int,
    budgets: Mapping[Device, int],
    rates: Bandwidths,
    rate: ComputeRate,
) -> Forecast:
    quantization = None if arguments.quantize is None else _QUANTIZATIONS[arguments.quantize]()
    sizes = None if quantization is None else quantized_sizes(model, quantization)
    layout = ModelLayout.of(model, special_sizes=sizes)
    blocks = blocks_of(layout, no_split=whole_classes(model), offload_buffers=False)
    try:
        prompt = prompt_of(model, arguments.batch, seq)
        token = token_after(model, arguments.batch, seq)
        prefill = measure_costs(model, kwargs=prompt, blocks=blocks, rate=rate)
        decode = measure_costs(model, kwargs=token, blocks=blocks, rate=rate)
    except CostError:
        raise
    except RuntimeError as error:  # torch's error for shapes that do not fit
        folder = arguments.model_dir.removesuffix("/config.json")
        raise ValueError(
            f"a forward of the model that {folder}/config.json describes fails ({error}): check "
            "the sizes in it"
        ) from error
    return forecast(blocks, budgets, rates, prefill=prefill, token=decode)


def _torchao(config: str) -> Quantization:
    try:
        library: Any = import_module("torchao.quantization")
    except ModuleNotFoundError as error:
        raise ImportError("--quantize torchao-...: pip install 'drivetrain-dispatch[torchao]'") from error
    return TorchAO(getattr(library, config)())


def _as_text(
    model: nn.Module, arguments: PlanArguments, found: Forecast, rate: ComputeRate, rates: Bandwidths
) -> str:
    size = format_size(sum(found.device_map.sizes.values()))
    rows: list[tuple[str, ...]] = [
        ("device", "at its peak", "of", "weights", "on their way", "kept", "activations")
    ]
    for device, held in found.holdings.items():
        budget = "no end" if held.budget_bytes is None else format_size(held.budget_bytes)
        parts = (held.weight_bytes, held.moving_bytes, held.kept_bytes, held.activation_bytes)
        rows.append((str(device), format_size(held.peak_bytes), budget, *map(format_size, parts)))
    table = [format_table(rows, right=range(1, len(rows[0])))]
    kept = ", ".join(filter(None, (_dtype_of(model), arguments.quantize)))
    said = f"{rate.flops_per_second / 1e12:g} TFLOP/s, {format_size(rate.bytes_per_second)}/s of memory"
    return "\n".join(
        [
            f"{type(model).__name__}, {kept}, {size}; {arguments.batch} x {arguments.seq} tokens",
            _limit(found),
            f"prompt   {_seconds(found.prefill_seconds)}",
            f"a token  {_seconds(found.token_seconds)}",
            f"with {said}, link {format_size(rates.to_device)}/s, disk {format_size(rates.from_disk)}/s",
            "",
            *table,
            "",
            str(found.device_map),
        ]
    )


def _limit(found: Forecast) -> str:
    """Return a line that says where the weights fit, and what limits the time of a token."""
    computed = sum(found.device_map.seconds.values())
    tiers = set(map(tier_of, found.device_map.values()))
    if tiers == {Tier.DEVICE}:
        return "fits: all weights stay where they are computed; computing is what takes the time"
    if tiers == {Tier.HOST}:
        return "fits into the host's memory, which computes"
    slow = "disk" if Tier.DISK in tiers else "link"
    if found.token_seconds <= 1.1 * computed:
        return "fits with weights that come and go, behind what is computed meanwhile"
    return f"fits with weights that come and go: the {slow} is what takes the time"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"


def _dtype_of(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")
