"""The effective plan of a live run: read back from its parts, shown once, and stored."""

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.parts.parts import Parts
from drivetrain.plan.effective_plan import EffectivePlan, make_plan
from drivetrain.plan.global_batch import scale_accumulation
from drivetrain.plan.plan_summary import summarize
from drivetrain.settings import RunSettings, usual_backend
from drivetrain_data import ShardedLoader
from drivetrain_precision import is_low_bit, optimizer_states

_PRECISIONS = {"no": "the model's own precision"}


def plan_of(parts: Parts) -> EffectivePlan:
    """Read back the values in force and compare them with the requested ones.

    Raises:
        PlanMismatchError: A value in force differs from the requested one.
    """
    topology, loaders = parts.context.topology, parts.prepared.loaders
    # In how many bits each low-bit optimizer keeps its states, once it has any.
    low_bit = [optimizer_states(o) for one in parts.prepared.optimizers if is_low_bit(o := one.optimizer)]
    divided = ("layers", "divided"), ("sequences", "divided_sequences")  # facts, and what backends call them
    steps, applied = parts.backend.window.next_num_micro_batches, parts.backend.applied()
    nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes} nodes"
    facts = {
        "processes": f"{topology.world_size} on {nodes}",
        "device": str(parts.context.device),
        "backend": type(parts.backend).__name__,
        "precision": _PRECISIONS.get(parts.policy.mode, parts.policy.mode),
        **{fact: f"divided {applied[key]}" for fact, key in divided if applied.get(key)},
        **{f"data {i}": f"{_describe(one, steps)}" for i, one in enumerate(loaders)},
        **{f"states {i}": str(one) for i, one in enumerate(low_bit) if one.elements},
        **({"trackers": ", ".join(parts.trackers.names)} if parts.trackers.names else {}),
        **parts.facts,
    }
    details = {f"data {i}": loader.order_source for i, loader in enumerate(loaders)}
    details |= {f"data seed {i}": f"{loader.seed}: {loader.seed_source}" for i, loader in enumerate(loaders)}
    return make_plan(
        parts.resolved,
        _read_back(parts),
        reasons=_reasons(parts),
        facts=facts,
        details=details,
    )


def _reasons(parts: Parts) -> dict[str, str]:
    """Return the reasons why the applied value of a setting may differ from the requested one."""
    num_ranks, run = parts.context.ranks("counts").size, parts.settings
    reasons = {
        "state.deterministic": "switched on in torch by the program",
        "run.gradient_accumulation_steps": "set by the program since",
        "run.log_with": "all trackers of the installed packages",
    }
    if (meant_for := run.accumulation_world_size) is not None:
        scaled = scale_accumulation(
            run.gradient_accumulation_steps, meant_for=meant_for, processes=parts.shard.count
        )
        in_force = replace(scaled, steps=parts.backend.window.next_num_micro_batches)
        reasons["run.gradient_accumulation_steps"] = str(in_force)
    if loaders := parts.prepared.loaders:
        reasons["data.seed"] = f"of the first loader: {loaders[0].seed_source}"
    if run.backend is None:
        alone = "one process" if parts.context.topology.world_size == 1 else "all processes train one replica"
        reasons["run.backend"] = alone if num_ranks == 1 else f"{num_ranks} processes"
    reasons |= parts.chosen
    if run.mixed_precision in ("auto", "fp8"):  # fp8 falls back where the settings say so
        reasons["run.mixed_precision"] = parts.policy.reason
    if parts.resolved["state"].value.device == "auto":
        reasons["state.device"] = "the best that this machine has"
    return reasons


def _read_back(parts: Parts) -> dict[str, Mapping[str, object]]:
    """Return the values in force by section and field, as far as live objects expose them."""
    by_backend = parts.backend.applied()
    run: dict[str, object] = {}
    if parts.settings.backend is None:
        ranks = parts.context.ranks
        run["backend"] = usual_backend(ranks("counts").size, ranks("shard").size)
    elif "run.backend" in parts.chosen:
        run["backend"] = parts.backend.settings_section or usual_backend(1)
    if "all" in parts.settings.log_with:
        run["log_with"] = parts.trackers.names
    sections: dict[str, Mapping[str, object]] = {
        "run": {**by_backend, **run},
        "precision": by_backend,
        "model": parts.changes.applied(),
        "state": parts.context.applied(),
    }
    if parts.backend.settings_section is not None:
        sections[parts.backend.settings_section] = by_backend
    if loaders := parts.prepared.loaders:
        sections["data"] = {"seed": loaders[0].seed}
    return sections


def _describe(loader: ShardedLoader[Any], num_micro_batches: int) -> str:
    """Describe a loader: its batches, the first words of its order, and the seed if the order depends on it."""
    order = loader.order_source.split(":")[0].split("; ")[0]
    if "seed" in loader.order_source and "seed" not in order:
        order = f"{order}, seed {loader.seed}"
    if loader.batch_size is None:
        return f"batches as they come; {order}"
    factors = [f"batches of {loader.batch_size}"]
    factors += [f"{loader.shard.count} processes"] if loader.shard.count > 1 else []
    factors += [f"{num_micro_batches} micro-batches"] if num_micro_batches > 1 else []
    full = loader.batch_size * loader.shard.count * num_micro_batches
    return f"{' x '.join(factors)}{f' = {full} samples in a step' if len(factors) > 1 else ''}; {order}"


class _Shown(logging.Filter):
    """A logging filter that marks that this process has shown a plan.

    Args:
        process: The id of the process that has shown the plan; a forked process shows its own.
    """

    def __init__(self, process: int) -> None:
        super().__init__()
        self.process = process


def show_plan(plan: EffectivePlan, settings: RunSettings) -> None:
    """Print the plan to standard error once per process, if the settings request it. Called on rank 0.

    The logging system is process-wide and stateful by design, so the mark of a shown plan is kept there instead of in
    a global variable.
    """
    if not (settings.show_plan or settings.verbose):
        return
    logger, process = logging.getLogger(__name__), os.getpid()
    if any(isinstance(mark, _Shown) and mark.process == process for mark in logger.filters):
        return
    logger.addFilter(_Shown(process))
    whole = "--verbose at the launch prints it"
    if settings.project_dir is not None:
        whole = f"{settings.project_dir / 'plan.json'}; {whole}"
    text = str(plan) if settings.verbose else summarize(plan, whole=whole)
    sys.stderr.write(f"{text}\n")


def store_plan(plan: EffectivePlan, settings: RunSettings) -> None:
    """Write the plan to plan.json in the project's folder, if the run has a folder. Called on rank 0."""
    if settings.project_dir is not None:
        settings.project_dir.mkdir(parents=True, exist_ok=True)
        (settings.project_dir / "plan.json").write_text(json.dumps(plan.as_dict(), indent=2) + "\n")
