"""Choose the backend for the first models that are prepared, before they move: by the planner, on rank 0."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from drivetrain.parts.parts import Parts
from drivetrain.prepare.step_check import StepCheck
from drivetrain_backends import SupportsWaitWatch
from drivetrain_backends.modules.block_changes import BlockChanges
from drivetrain_data import ShardedLoader
from drivetrain_data.sources.sample_batch import sample_batch
from drivetrain_messages import format_size
from drivetrain_plan import (
    ModuleSource,
    PlanError,
    PlanTable,
    TrainingJob,
    TrainingMode,
    measure_hardware,
    plan_training,
)
from drivetrain_state.collectives.collective_errors import on_main

logger = logging.getLogger(__name__)
_AXES = ("pipeline", "context", "tensor", "expert")  # a loop's ranks along them are connected already

Inputs = Callable[[int, int], Mapping[str, Any]]  # the arguments of a forward, for samples and tokens
Loaders = Sequence[tuple[Any, ShardedLoader[Any]]]  # of the loop: as the user built each, and its shard


def choose_backend(
    parts: Parts, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], loaders: Loaders
) -> None:
    """Exchange the backend of an Accelerator for the best that its loop allows. Called on all ranks.

    The loop has divided its samples among ranks, and says how many make a step: what is chosen is what ranks hold and
    compute of the models.

    Args:
        parts: The parts of the Accelerator, whose backend is open.
        models: The models to prepare.
        optimizers: The optimizers to prepare with them.
        loaders: The loaders to prepare with them.

    Raises:
        PlanError: No plan fits; the message says what is missing. On other ranks an OtherRankFailedError.
    """
    table, memory_bytes = _plan(parts, models, optimizers, loaders)
    best, open_backend = table.plans[0], parts.open_backend
    assert open_backend is not None
    backend, set_by_plan = open_backend.backend_of(best.choice, parts.backend.window)
    parts.backend.close()
    parts.backend, parts.open_backend = backend, None
    if changes := best.choice.sections().get("model"):
        parts.changes = BlockChanges(replace(parts.resolved["model"].value, **changes))
        set_by_plan += tuple(f"model.{name}" for name in changes)
    if parts.watch is not None and isinstance(backend, SupportsWaitWatch):
        backend.watch_waits(parts.watch.begin_wait)
    parts.chosen |= dict.fromkeys(set_by_plan, f"of the plan {best.choice.name}")
    if open_backend.named is None:
        parts.chosen["run.backend"] = f"of the plan {best.choice.name}"
    peak, usable = (format_size(int(size)) for size in (best.memory.peak, memory_bytes))
    by = "the program of a rank" if best.basis == "program" else "formula"
    parts.facts["plan"] = (
        f"{best.choice.name}; {best.why}; {peak} of {usable} and {best.time.seconds:.3g} s a step, by {by}"
    )
    check = StepCheck(parts, best, not_modelled=_not_modelled(table, loaders))
    parts.prepared.on_step.append(check.end_step)
    open_backend.on_chosen()


def _plan(
    parts: Parts, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], loaders: Loaders
) -> tuple[PlanTable, int]:
    """Return rank 0's plans, the best first, and the bytes of a device. Called on all ranks.

    Raises:
        PlanError: No plan fits. On other ranks an OtherRankFailedError.
    """
    open_backend, context = parts.open_backend, parts.context
    assert open_backend is not None
    held = {id(t): t for model in models for t in (*model.parameters(), *model.buffers())}
    own = sum(t.numel() * t.itemsize for t in held.values() if t.device.type == context.device.type)
    hardware = measure_hardware(context, held_bytes=own)

    def plan() -> PlanTable:
        logger.info("planning how to train %s", ", ".join(type(model).__name__ for model in models))
        batch, size = _first_batch(loaders)
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        reads = context.ranks("reads").size
        job = TrainingJob(
            batch=size * parts.backend.window.next_num_micro_batches * reads,
            engines=open_backend.named is not None,
            pins={**_pins_of_mesh(parts), **open_backend.pins(), "micro_batch": size},
        )
        mode = TrainingMode(name="run", about="", dtype=None, autocast=parts.policy.autocast_dtype)

        inputs: Inputs | None = None if batch is None else lambda size, _: _inputs_of(model, batch, size)
        table = plan_training(
            ModuleSource(model, inputs), hardware, job, mode,
            num_tokens=_num_tokens(batch), optimizer=_maker_of(optimizers, context.device),
        )  # fmt: skip
        kept = tuple(one for one in table.plans if open_backend.allows(one.choice))
        if table.plans and not kept:
            raise PlanError(
                f"no plan that fits keeps what the settings say; the first is {table.plans[0].choice.name}: leave a "
                "setting out, or say what the plan needs, such as a folder on NVMe"
            )
        if not kept:
            raise PlanError(f"{table.missing()}; or name a backend, which is tried whatever is predicted")
        return replace(table, plans=kept)

    return on_main(context, plan, doing="planning how to train"), hardware.memory_bytes


def _first_batch(loaders: Loaders) -> tuple[Any, int]:
    """Return a batch as the first loader gives it, and its number of samples; None and 1 if it cannot be read."""
    for loader, sharded in loaders:
        if (size := sharded.batch_size) is not None:
            return sample_batch(loader, size), size
    return None, 1


def _pins_of_mesh(parts: Parts) -> dict[str, Any]:
    """Return the parts of the plan that the run's own mesh says; one rank along each axis without one."""
    mesh, parallelism = parts.context.plan, parts.context.parallelism
    if mesh is None or parallelism is None:
        return dict.fromkeys(_AXES, 1)
    pins: dict[str, Any] = {axis: mesh.size(axis) if axis in mesh.names else 1 for axis in _AXES}
    pins["expert"] = parallelism.expert or 1
    pins["sequence"] = bool(parallelism.sequence)
    if "shard" in mesh.names:
        pins |= {axis: mesh.size(axis) for axis in ("data", "shard")}
    return pins


def _inputs_of(model: nn.Module, batch: Any, size: int) -> dict[str, Any]:
    """Return the arguments of the model's forward as the loop is likely to give them, without the batch's values.

    A mapping is given by the names that the forward takes; of a sequence, as many as it needs.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    plain = [
        one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if hasattr(batch, "items"):
        given = {name: value for name, value in batch.items() if takes_all or name in parameters}
    else:
        values = list(batch) if isinstance(batch, (list, tuple)) else [batch]
        needed = max(1, sum(one.default is one.empty for one in plain))
        given = {one.name: value for one, value in zip(plain, values[:needed], strict=False)}
    return {name: _like(value, size) for name, value in given.items()}


def _like(value: Any, size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = (size, *value.shape[1:]) if value.dim() else ()
    return torch.zeros(shape, dtype=value.dtype)


def _num_tokens(batch: Any) -> int:
    """Return the tokens of a sample, where a batch has them by the usual name; 1 otherwise."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.shape[1] if isinstance(ids, Tensor) and ids.dim() > 1 else 1


def _maker_of(
    optimizers: Sequence[Optimizer], device: torch.device
) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return a function that makes an optimizer like the first of the loop; AdamW if that needs more than options."""
    adamw = partial(AdamW, foreach=device.type != "cpu")
    if not optimizers:
        return adamw
    first, defaults = optimizers[0], dict(optimizers[0].defaults)
    if device.type != "cpu" and "foreach" in defaults and not (defaults["foreach"] or defaults.get("fused")):
        defaults["foreach"] = True  # which torch takes on an accelerator
    accepted = inspect.signature(type(first)).parameters
    options = {name: value for name, value in defaults.items() if name in accepted}
    maker: Callable[[list[nn.Parameter]], Optimizer] = partial(type(first), **options)
    try:
        maker([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError):
        return adamw
    return maker


def _not_modelled(table: PlanTable, loaders: Loaders) -> str:
    """Return what the prediction left out, in words."""
    said = ["what the loop computes outside of the model, such as its loss, metrics and the wait for data"]
    if table.why_formula:
        said.append(f"the program of the model ({table.why_formula})")
    if not loaders:
        said.append("the batch: no loader was prepared with the model, and one sample was taken for it")
    return "; ".join(said)
