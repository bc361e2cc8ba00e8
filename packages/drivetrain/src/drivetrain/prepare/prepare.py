"""Sort the arguments of `prepare` by kind, prepare each kind, and return the results in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain.parts.parts import Parts
from drivetrain.plan.effective import plan_of, show_plan, store_plan
from drivetrain.prepare.loaders import shard
from drivetrain.prepare.schedule_length import tell_unsharded_lengths
from drivetrain_backends import Prepared, PreparedOptimizer, PreparedScheduler, Scheduler
from drivetrain_data import ShardedLoader, is_loader
from drivetrain_data.settings import UnevenPolicy
from drivetrain_precision.fp8.layer_conversion import describe_converted
from drivetrain_precision.quantized.fake_quantize import check_trained_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """The arguments of a `prepare` call by kind, each list in the order of the call."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    schedulers: list[Scheduler]
    loaders: list[Any]


def sort_objects(objects: Sequence[object]) -> Sorted:
    """Sort objects by kind.

    Raises:
        TypeError: An object is of a kind that cannot be prepared; the message gives its position and type.
        ValueError: An object is already prepared, or is given twice.
    """
    found = Sorted(models=[], optimizers=[], schedulers=[], loaders=[])
    for place, obj in enumerate(objects):
        if isinstance(obj, (PreparedOptimizer, PreparedScheduler, ShardedLoader)):
            raise ValueError(f"prepare(): argument {place} is a {type(obj).__name__} and prepared already")
        if any(obj is earlier for earlier in objects[:place]):
            raise ValueError(f"prepare(): argument {place} ({type(obj).__name__}) comes twice")
        _list_for(obj, found, place).append(obj)
    return found


def prepare_objects(
    objects: Sequence[object], parts: Parts, *, even: UnevenPolicy | None = None
) -> list[object]:
    """Prepare objects, and show and store the plan that results. Called on all ranks.

    Args:
        objects: Models, optimizers, schedulers and loaders, in any order.
        parts: The parts of the Accelerator; the prepared objects are added to them.
        even: The treatment of the loaders' tails; None takes the setting.

    Returns:
        The prepared objects in the order given.
    """
    found = sort_objects(objects)
    # Loaders first: they cannot fail half-way, and a bad one must not leave models changed.
    first = len(parts.prepared.loaders)
    loaders = [shard(loader, parts, place=first + i, even=even) for i, loader in enumerate(found.loaders)]
    sizes = {loader.batch_size for loader in loaders}
    if len(sizes) == 1:
        parts.backend.window.micro_batch_size = sizes.pop()
    if parts.open_backend is not None and found.models:
        from drivetrain.prepare.choose_backend import (
            choose_backend,  # a run that names its backend plans nothing
        )

        choose_backend(parts, found.models, found.optimizers, list(zip(found.loaders, loaders, strict=True)))
    models = _prepare_models(found, parts)
    replaced: dict[int, object] = {id(old): new for old, new in zip(found.loaders, loaders, strict=True)}
    for one in models:
        replaced |= {id(one.unwrap()): one.model, id(one.model): one.model}
        replaced |= {id(optimizer.optimizer): optimizer for optimizer in one.optimizers}
        replaced |= {id(scheduler.scheduler): scheduler for scheduler in one.schedulers}
    results = [replaced[id(obj)] for obj in objects]
    parts.prepared.add(models, results)
    tell_unsharded_lengths(parts, zip(found.loaders, loaders, strict=True))
    plan = plan_of(parts)
    if parts.context.topology.is_main:
        store_plan(plan, parts.settings)
        if models:
            show_plan(plan, parts.settings)
    return results


def _prepare_models(found: Sorted, parts: Parts) -> Sequence[Prepared]:
    """Prepare models with their optimizers and schedulers; convert the models first if the run trains in fp8."""
    parts.prepared.restore_evaluated(found.models)
    for model in found.models:
        check_trained_weights(model)
    if parts.fp8 is None:
        models = _prepare_changed(found, parts)
        everything = {*found.models, *(one.unwrap() for one in parts.prepared.models)}
        if (fact := describe_converted(everything)) is not None:  # the program has converted layers itself
            from drivetrain.fp8.fp8_training import LAYERS, check_gathers

            check_gathers(
                found.models, said="a model converted by convert_model with TorchaoRecipe(all_gather=True)"
            )
            parts.facts[LAYERS] = fact
        return models
    facts = parts.fp8.convert(found.models)
    try:
        models = _prepare_changed(found, parts)
        parts.fp8.check()
    except BaseException:
        parts.fp8.undo()
        raise
    parts.facts.update(facts)
    return models


def _prepare_changed(found: Sorted, parts: Parts) -> Sequence[Prepared]:
    """Make the changes that the run asks for in every model, and have the backend prepare it."""
    try:
        parts.changes.apply(found.models)
        return parts.backend.prepare(found.models, found.optimizers, found.schedulers)
    except BaseException:
        if not parts.prepared.models:
            parts.changes.undo()
        raise


def _list_for(obj: object, found: Sorted, place: int) -> list[Any]:
    if isinstance(obj, nn.Module):
        return found.models
    if isinstance(obj, Optimizer):
        return found.optimizers
    if isinstance(obj, DataLoader):
        return found.loaders
    if isinstance(obj, Scheduler):
        if hasattr(obj, "zero_grad"):
            raise TypeError(
                f"prepare(): argument {place} ({type(obj).__name__}) steps parameters and is no "
                "torch.optim.Optimizer, so that neither its windows nor its state could be kept: derive it from "
                "torch.optim.Optimizer, with param_groups, state, state_dict and load_state_dict"
            )
        return found.schedulers
    if is_loader(obj):
        return found.loaders
    raise TypeError(
        f"prepare(): argument {place} is of type {type(obj).__name__}, which cannot be prepared; allowed are "
        "nn.Module, Optimizer, DataLoader (or any iterable of batches with a .dataset, or with state_dict and "
        "load_state_dict) and a scheduler with .optimizer, "
        "step, state_dict and load_state_dict. Leave other objects out, and register what must be saved with "
        "register_for_checkpointing"
    )
