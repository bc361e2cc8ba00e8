"""The plan of a live run: read back from its parts, shown and stored once."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.compose import Parts
from drivetrain.plan import EffectivePlan, make_plan
from drivetrain.settings import RunSettings
from drivetrain_data import ShardedLoader


def plan_of(parts: Parts, loaders: Sequence[ShardedLoader[Any]]) -> EffectivePlan:
    """Read back what is in force and hold it against what was asked.

    Raises:
        PlanMismatchError: Something applied differs from what was asked.
    """
    reasons = {
        "state.deterministic": "switched on in torch by the program",
        "data.seed": "that of the loader state that was loaded",
    }
    if parts.settings.mixed_precision == "auto":
        reasons["run.mixed_precision"] = parts.policy.reason
    if parts.resolved["state"].value.device == "auto":
        reasons["state.device"] = "the best that this machine has"
    topology = parts.context.topology
    facts = {
        "processes": f"{topology.world_size} on {topology.num_nodes} node(s)",
        "device": str(parts.context.device),
        "backend": type(parts.backend).__name__,
        **{f"data order {i}": loader.order_source for i, loader in enumerate(loaders)},
        **parts.facts,
    }
    return make_plan(parts.resolved, _read_back(parts, loaders), reasons=reasons, facts=facts)


def _read_back(parts: Parts, loaders: Sequence[ShardedLoader[Any]]) -> dict[str, Mapping[str, object]]:
    """What is in force, by section and field, as far as live objects tell."""
    by_backend = parts.backend.applied()
    sections = {"run": by_backend, "state": parts.context.applied()}
    if parts.backend.settings_section is not None:
        sections[parts.backend.settings_section] = by_backend
    if loaders:
        asked = parts.resolved["data"].value.seed
        sections["data"] = {"seed": next((x.seed for x in loaders if x.seed != asked), asked)}
    return sections


def show_plan(plan: EffectivePlan, settings: RunSettings) -> None:
    """Print the plan to standard error, where that is wanted. Called on rank 0."""
    if settings.show_plan:
        sys.stderr.write(f"{plan}\n")


def store_plan(plan: EffectivePlan, settings: RunSettings) -> None:
    """Store the plan as plan.json in the project's folder, if there is one. Called on rank 0."""
    if settings.project_dir is not None:
        settings.project_dir.mkdir(parents=True, exist_ok=True)
        (settings.project_dir / "plan.json").write_text(json.dumps(plan.as_dict(), indent=2) + "\n")
