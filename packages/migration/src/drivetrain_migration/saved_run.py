"""Resume a run that Hugging Face Accelerate saved: match the whole state first, then apply it."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from drivetrain.extension import RunState, Stateful, reseed_generators
from drivetrain_backends import Prepared, PreparedOptimizer
from drivetrain_checkpoint import AccelerateState, find_accelerate_state, read_accelerate_state
from drivetrain_data.compat import NUM_YIELDED
from drivetrain_migration.saved_state import match_model, match_optimizer, steps_of
from drivetrain_state import gather_object, load_rng_state
from drivetrain_state.collectives.collective_errors import on_each_rank

logger = logging.getLogger(__name__)

# As drivetrain-accelerate registers those of programs; models in evaluation mode with their place among all models.
_SCHEDULER = re.compile(r"scheduler_\d+")
_EVALUATED = re.compile(r"evaluation_model_(\d+)")


class _Registered(NamedTuple):
    """The registered objects: the program's own, the schedulers, and the models in evaluation mode by place."""

    objects: list[Stateful]
    schedulers: list[Stateful]
    evaluated: dict[int, nn.Module]


find = find_accelerate_state  # the other half of a run format's module


def load(run: RunState, folder: Path) -> tuple[int, str]:
    """Load the files that Accelerate's `save_state` wrote. Called on all ranks.

    The main process logs one warning that lists everything that could not be restored exactly.

    Returns:
        The optimizer step of the saved state, and how the random number generators were restored, for the plan.

    Raises:
        ForeignStateError: A file holds content that could run code, or has a format that cannot be read.
        CorruptCheckpointError: A file is missing or damaged.
        ValueError: The state is of other models, optimizers, schedulers or registered objects. In all of these cases
            nothing was applied.
        OtherRankFailedError: Another rank failed; the message holds its error.
    """
    run.context.progress.mark(f"read {folder.name}")
    own = [one.state_dict() for one in run.prepared]  # collective: all ranks gather before one can fail
    saved, states, evaluated = on_each_rank(
        run.context, lambda: _read(run, folder, own), doing=f"the load of {folder}"
    )
    for one, state in zip(run.prepared, states, strict=True):
        one.load_state_dict(state)
    notes = [*saved.left_out, *_notes_on_schedules(run, saved)]
    backend = run.backend.state_dict()
    if backend["scaler"] is not None and saved.scaler is not None:
        run.backend.load_state_dict({**backend, "scaler": saved.scaler})
    elif backend["scaler"] is not None:  # the precision has changed
        notes.append("that run did not scale its loss: the scale starts at its initial value")
    elif saved.scaler is not None:
        notes.append("scaler.pt: this run does not scale its loss")
    registered = _registered(run)
    for obj, state in zip(registered.objects, saved.custom, strict=True):
        obj.load_state_dict(state)
    for obj, state in zip(registered.schedulers, saved.schedulers, strict=bool(registered.schedulers)):
        obj.load_state_dict(state)
    loaded = [each for each in registered.evaluated.values() if not run.keeps(each)]
    for model, state in zip(loaded, evaluated, strict=True):
        model.load_state_dict(state)
    # Hosts without a shared disk see only the files of their own ranks.
    world_size = max(gather_object(run.context, saved.world_size))
    is_same = world_size == run.context.topology.world_size
    if is_same and all(gather_object(run.context, saved.generators is not None)):
        assert saved.generators is not None
        load_rng_state(saved.generators)
        became = "restored as Accelerate saved them"
    else:
        became = reseed_generators(run, saved_world_size=world_size, step=run.step)
    if run.context.topology.is_main:
        logger.warning("%s", _warning(run, saved, [*notes, f"random number generators: {became}"]))
    return run.step, became


def _read(
    run: RunState, folder: Path, own: Sequence[Mapping[str, Any]]
) -> tuple[AccelerateState, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a folder's state, the state for each prepared model, and that for each evaluated model."""
    topology = run.context.topology
    saved = read_accelerate_state(folder, rank=topology.rank, local_rank=topology.local_rank)
    _check_numbers(run, saved)
    weights = {id(one): each for one, each in zip(_models_in(run, saved), saved.models, strict=True)}
    states = [
        _state_of(run, saved, weights, one, state) for one, state in zip(run.prepared, own, strict=True)
    ]
    evaluated = [
        dict(match_model(weights[id(model)], model.state_dict(), model))
        for model in _registered(run).evaluated.values()
        if not run.keeps(model)
    ]
    return saved, states, evaluated


def _check_numbers(run: RunState, saved: AccelerateState) -> None:
    """Raise a ValueError if the run has another number of models, optimizers, schedulers or registered objects."""
    registered, schedulers, _ = _registered(run)
    for what, there, here in (
        ("models", saved.models, _models_in(run, saved)),
        ("optimizers", saved.optimizers, run.optimizers),
        ("schedulers", saved.schedulers, schedulers or run.schedulers),
        ("registered objects", saved.custom, registered),
    ):
        if len(there) != len(here):
            hint = "; name models that the program loads by itself as kept_models" if what == "models" else ""
            raise ValueError(
                f"{saved.folder} holds {len(there)} {what}, and this run has {len(here)}: prepare and register the "
                f"same ones, in the same order, before load_state(){hint}"
            )


def _models_in(run: RunState, saved: AccelerateState) -> list[Prepared | nn.Module]:
    """Return the models whose weights the files hold, in the order in which they were prepared.

    These are all models of the run, or all but the kept ones if a hook took the kept ones out of the save.
    """
    every: list[Prepared | nn.Module] = list(run.prepared)
    for place, model in sorted(_registered(run).evaluated.items()):
        every.insert(place, model)
    loaded = [each for each in every if not run.keeps(each)]
    return loaded if len(saved.models) == len(loaded) else every


def _registered(run: RunState) -> _Registered:
    """Return the registered objects by kind. The name of an object tells its kind."""
    found = _Registered([], [], {})
    for name, obj in run.custom.items():
        if (place := _EVALUATED.fullmatch(name)) and isinstance(obj, nn.Module):
            found.evaluated[int(place[1])] = obj
        else:
            (found.schedulers if _SCHEDULER.fullmatch(name) else found.objects).append(obj)
    return found


def _state_of(
    run: RunState,
    saved: AccelerateState,
    weights: Mapping[int, Mapping[str, Any]],
    prepared: Prepared,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a prepared model's saved state, as its `state_dict` has it; a kept model keeps its current weights."""
    clone = run.context.device.type == "cpu"  # an optimizer on the CPU would keep the file's own memory
    optimizers = [
        match_optimizer(
            saved.optimizers[_place(run.optimizers, optimizer)],
            named["param_groups"],
            shapes=_shapes(optimizer, named["param_groups"], own["model"]),
            kind=type(optimizer.optimizer).__name__,
            clone=clone,
        )
        for optimizer, named in zip(prepared.optimizers, own["optimizers"], strict=True)
    ]
    schedulers = [saved.schedulers[_place(run.schedulers, one)] for one in prepared.schedulers]
    return {
        "model": own["model"]
        if run.keeps(prepared)
        else match_model(weights[id(prepared)], own["model"], prepared.unwrap()),
        "optimizers": optimizers,
        "schedulers": [dict(one) for one in schedulers],
        "num_steps": [steps_of(one) or 0 for one in optimizers],
        "scheduler_lags": [0] * len(schedulers),
    }


def _shapes(
    optimizer: PreparedOptimizer, groups: list[dict[str, Any]], model: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Return each parameter's full shape; if the model lacks it, the shape of the tensor in the optimizer."""
    live = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [name for group in groups for name in group["params"]]
    tensors = dict(zip(names, live, strict=False)) | {name: model[name] for name in names if name in model}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _place(row: Sequence[object], wanted: object) -> int:
    return next(place for place, one in enumerate(row) if one is wanted)


def _notes_on_schedules(run: RunState, saved: AccelerateState) -> list[str]:
    notes: list[str] = []
    pairs = list(zip(run.schedulers, saved.schedulers, strict=True)) if run.schedulers else []
    for number, optimizer in enumerate(run.optimizers):
        if steps_of(saved.optimizers[number]) is None:
            notes.append(f"optimizer {number} keeps no count of its steps: they are counted from 0")
            continue
        for scheduler, state in pairs:
            at = state.get("last_epoch")
            is_its = scheduler.scheduler.optimizer in (optimizer, optimizer.optimizer)
            if is_its and saved.world_size > 1 and at == optimizer.num_steps * saved.world_size:
                notes.append(
                    f"a scheduler stands at {at} after {optimizer.num_steps} optimizer steps, for Accelerate "
                    "advanced it once a step for each process; from here on it advances once a step: if its length "
                    "was meant for that, build it again for the steps that are left"
                )
    return notes


def _warning(run: RunState, saved: AccelerateState, notes: list[str]) -> str:
    """Return the text of the warning: the restored state, the state that was not restored, and advice."""
    steps = [state[NUM_YIELDED] for state in saved.loaders if isinstance(state.get(NUM_YIELDED), int)]
    known = ""
    if steps:
        known = f" (its loaders had given {steps} batches of their epoch to each process)"
    elif saved.num_accumulated:
        known = f" (it had entered accumulate() {saved.num_accumulated} times in all)"
    place = (
        f"the place in the data{known}: Accelerate's order of samples is not drivetrain's, and loaders begin an "
        "epoch; to train on the rest of one, read accelerator.skip_first_batches(loader, number of batches) first"
    )
    told = [place, *notes] if run.loaders else notes
    return (
        f"{saved.folder} was saved by Accelerate: models, optimizers, schedulers and registered objects are taken "
        f"over at step {run.step}. Note: {'; '.join(told)}. The next save_state() is drivetrain's own"
    )
