"""Plan how to train a model on given hardware."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from drivetrain_dispatch.errors import CostError
from drivetrain_messages import format_size, format_table
from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.cli.plan_arguments import PlanTrainingArguments
from drivetrain_plan.errors import PlanError
from drivetrain_plan.hardware import parse_hardware
from drivetrain_plan.model.source import find_source
from drivetrain_plan.model.training_modes import MODES
from drivetrain_plan.picture import draw_plans
from drivetrain_plan.planner import plan_training
from drivetrain_plan.search.candidates import TrainingJob
from drivetrain_plan.search.memory import DeviceMemory
from drivetrain_plan.search.ranking import PlanTable, TrainingPlan

TOPIC = "Plan"  # in `drivetrain --help`

_USAGE = 2  # exit code of a command that cannot be carried out
_COMPONENTS = tuple(each.name for each in fields(DeviceMemory))


def run(arguments: PlanTrainingArguments) -> int:
    """Plan how to train a model on given hardware, by predicted memory, traffic and time."""
    try:
        hardware = parse_hardware(arguments.gpu)
        job = TrainingJob(batch=arguments.batch, engines=arguments.deepspeed, pins=parse_pins(arguments.pin))
        table = plan_training(
            find_source(arguments.model, lora_rank=arguments.lora_rank),
            hardware,
            job,
            MODES[arguments.mode],
            num_tokens=arguments.sequence,
            optimizer=arguments.optimizer,
        )
        if arguments.picture is not None:
            arguments.picture.write_text(draw_plans(table, arguments.show), encoding="utf-8")
    except (PlanError, CostError, ValueError, ImportError, OSError) as error:
        sys.stderr.write(f"drivetrain: error: {' '.join(str(error).split())}\n")
        return _USAGE
    if arguments.json:
        sys.stdout.write(f"{json.dumps(as_json(table, arguments), indent=2)}\n")
    elif table.plans:
        sys.stdout.write(f"{_as_text(table, arguments)}\n")
    if not table.plans:
        sys.stderr.write(f"drivetrain: error: {table.missing()}\n")
        return 1
    return 0


def parse_pins(pins: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a plan that are given, by name, with values of their types.

    Raises:
        PlanError: One is not written as name=value, or is no number where a number is needed.

    Example:
        >>> parse_pins(["tensor=2", "strategy=full_shard"])
        {'tensor': 2, 'strategy': 'full_shard'}
    """
    found: dict[str, Any] = {}
    texts = ("strategy", "offload", "checkpointing", "backend")
    for pin in pins:
        name, separator, value = pin.partition("=")
        if not separator:
            raise PlanError(f"--pin {pin}: say name=value, such as tensor=2")
        if name in texts:
            found[name] = value
        elif name == "sequence" and value in ("true", "false"):
            found[name] = value == "true"
        elif value.isdecimal() and int(value):
            found[name] = int(value)
        else:
            raise PlanError(f"--pin {pin}: a size is a whole number of 1 or more; sequence is true or false")
    return found


def launch_line(choice: PlanChoice, num_hosts: int, precision: str) -> str:
    """Return the command that trains so; on several hosts it is run on each."""
    hosts = f" --num-nodes {num_hosts} --node-rank RANK --master-addr HOST" if num_hosts > 1 else ""
    parts = [f"drivetrain launch{hosts} --num-processes {choice.num_devices}"]
    for section, settings in choice.sections(precision).items():
        prefix = "" if section == "run" else f"{section}-"
        for name, value in settings.items():
            flag = f"--{prefix}{name.replace('_', '-')}"
            parts.append(flag if value is True else f"{flag} {value}")
    return " ".join([*parts, "train.py"])


def settings_text(choice: PlanChoice, precision: str) -> str:
    """Return the settings file that trains so, in YAML."""
    lines: list[str] = []
    for section, settings in choice.sections(precision).items():
        lines.append(f"{section}:")
        lines += [f"  {name}: {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(lines)


def as_json(table: PlanTable, arguments: PlanTrainingArguments) -> dict[str, Any]:
    """Return a table of plans as values of JSON."""
    return {
        "model": table.model,
        "parameters": table.num_parameters,
        "hardware": asdict(table.hardware),
        "plans": [_plan_as_json(plan, arguments) for plan in table.plans[: arguments.show]],
        "why_formula": table.why_formula,
        "rejected": [
            {"plan": plan.choice.name, "peak_bytes": int(plan.memory.peak), "why": plan.why}
            for plan in table.rejected
        ],
    }


def _plan_as_json(plan: TrainingPlan, arguments: PlanTrainingArguments) -> dict[str, Any]:
    by_view: dict[str, float] = {}
    for (view, _), payload in plan.traffic.payloads.items():
        by_view[view] = by_view.get(view, 0) + payload
    return {
        "plan": plan.choice.name,
        "choice": asdict(plan.choice),
        "peak_bytes": int(plan.memory.peak),
        "memory_bytes": {name: int(getattr(plan.memory, name)) for name in _COMPONENTS},
        "sent_bytes": {view: int(payload) for view, payload in by_view.items()},
        "seconds": plan.time.seconds,
        "bound_by": plan.time.bound_by,
        "basis": plan.basis,
        "why": plan.why,
        "settings": plan.choice.sections(_precision(arguments.mode)),
        "model_options": plan.choice.model_options() if plan.choice.is_built else {},
    }


def _precision(mode: str) -> str:
    return "bf16" if mode == "mixed" else "no"


def _as_text(table: PlanTable, arguments: PlanTrainingArguments) -> str:
    usable = format_size(int(table.usable_bytes))
    lines = [
        f"{table.model}: {table.num_parameters:,} parameters on {table.hardware.described()}, "
        f"{table.hardware.basis} rates",
        f"a step of {table.job.batch} samples of {table.num_tokens} tokens, {arguments.mode}, "
        f"{arguments.optimizer}; {usable} of a device may be used",
        "",
    ]
    rows = [("plan", "micro-batch", "memory", "sent", "step", "bound by", "basis")]
    for plan in table.plans[: arguments.show]:
        choice = plan.choice
        rows.append(
            (
                choice.name,
                f"{choice.micro_batch} x {choice.accumulation}",
                format_size(int(plan.memory.peak)),
                format_size(int(sum(plan.traffic.payloads.values()))),
                _seconds(plan.time.seconds),
                plan.time.bound_by,
                plan.basis,
            )
        )
    lines += [format_table(rows, right=range(1, 5)), ""]
    if len(table.plans) > arguments.show:
        lines.append(f"{len(table.plans) - arguments.show} more fit; --show tells them")
    lines += [f"does not fit: {plan.choice.name}: {plan.why}" for plan in table.rejected[:3]]
    if table.why_formula:
        lines.append(f"all figures follow from the model's sizes alone: {table.why_formula}")
    best = table.plans[0]
    lines += ["", f"{best.choice.name}: {best.why}"]
    held = ", ".join(f"{name} {format_size(int(getattr(best.memory, name)))}" for name in _COMPONENTS)
    lines += [f"  memory  {held}", f"  time    {_times(best)}", f"  sent    {_sent(best)}", ""]
    if best.choice.pipeline > 1:
        lines.append("  the loop calls accelerator.train_step, with a whole batch of a process\n")
    if best.choice.is_built:
        options = best.choice.model_options()
        lines.append(f"  the loop builds its model by megatron_from_transformers(model, options={options})\n")
    precision = _precision(arguments.mode)
    lines.append(launch_line(best.choice, table.hardware.num_hosts, precision))
    lines += ["", settings_text(best.choice, precision)]
    return "\n".join(lines)


def _times(plan: TrainingPlan) -> str:
    time = plan.time
    parts: Mapping[str, float] = {
        "products": time.compute,
        "other operations": time.memory,
        **{f"waits for {view}": seconds for view, seconds in time.exposed.items()},
        "bubble": time.bubble,
        "optimizer": time.optimizer,
        "offload": time.offload,
    }
    return ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in parts.items() if seconds)


def _sent(plan: TrainingPlan) -> str:
    sent = plan.traffic.payloads.items()
    return (
        ", ".join(
            f"{kind.replace('_', ' ')} over {view} {format_size(int(size))}" for (view, kind), size in sent
        )
        or "nothing"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
