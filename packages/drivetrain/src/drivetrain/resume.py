"""The state of a run: what is saved, under which names, and how it is taken up again."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from drivetrain.divided import as_in, mark_replicas
from drivetrain_backends import Backend, Prepared, PreparedOptimizer, PreparedScheduler
from drivetrain_checkpoint import Checkpointer
from drivetrain_checkpoint.storage import Place
from drivetrain_data import ShardedLoader
from drivetrain_state import Context, load_rng_state, reseed, rng_state

if TYPE_CHECKING:
    from drivetrain_checkpoint import Loaded

logger = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved: its state is nested plain values and tensors."""

    def state_dict(self) -> Mapping[str, Any]:
        """What must be saved."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Take up what was saved."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything a checkpoint holds, as live objects.

    Attributes:
        context: Ranks and device.
        prepared: The models with what trains them, in the order they were prepared.
        optimizers: All optimizers, in the order they were prepared.
        schedulers: All schedulers, likewise.
        backend: What trains them.
        loaders: The prepared loaders, in order.
        custom: Registered objects by name.
        seed: What generators are reseeded from where their own state does not fit the number of ranks.
    """

    context: Context
    prepared: Sequence[Prepared]
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[PreparedScheduler]
    backend: Backend
    loaders: Sequence[ShardedLoader[Any]]
    custom: Mapping[str, Stateful]
    seed: int

    @property
    def step(self) -> int:
        """The optimizer step: that of the optimizer that stepped most."""
        return max((optimizer.num_steps for one in self.prepared for optimizer in one.optimizers), default=0)


def register(custom: dict[str, Stateful], objects: Sequence[object], named: Mapping[str, object]) -> None:
    """Add objects to what is saved.

    Raises:
        TypeError: An object has no `state_dict` and `load_state_dict`.
        ValueError: A name is taken.
    """
    start = sum(name.startswith("object_") for name in custom)
    for name, obj in {**{f"object_{start + i}": obj for i, obj in enumerate(objects)}, **named}.items():
        if not isinstance(obj, Stateful):
            raise TypeError(
                f"register_for_checkpointing: {type(obj).__name__} has no state_dict() and load_state_dict(); "
                "give it both, returning plain values and tensors"
            )
        if name in custom:
            raise ValueError(f"register_for_checkpointing({name}=...): the name is taken; choose another")
        custom[name] = obj


def save(
    run: RunState,
    checkpointer: Checkpointer,
    *,
    plan: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    background: bool | None = None,
) -> Place:
    """Save a run, between accumulation windows. Called on all ranks."""
    models: dict[str, Any] = {}
    training: dict[str, Any] = {}
    for name, one in _named(run.prepared).items():
        state = mark_replicas(one.state_dict(), one)
        models[name] = state.pop("model")
        training[name] = state
    trains = any(one.optimizers for one in run.prepared)  # else nothing steps, and what was received is done
    replicated = {
        "training": training,
        "backend": run.backend.state_dict(),
        "loaders": [loader.state_dict(stepped=trains) for loader in run.loaders],
        "custom": {name: obj.state_dict() for name, obj in run.custom.items()},
    }
    run.context.watch.mark("save")
    path = checkpointer.save(
        run.step,
        models=models,
        replicated=replicated,
        per_rank={"rng": rng_state()},
        plan=plan,
        metrics=metrics,
        background=background,
    )
    run.context.watch.mark("saved")
    return path


def load(run: RunState, checkpointer: Checkpointer, path: Place | str | None) -> tuple[int, Place, str]:
    """Take up a saved run. Called on all ranks.

    Returns:
        The optimizer step it was saved at, the checkpoint's folder, and what became of the random number generators,
        for the plan.

    Raises:
        ValueError: The checkpoint holds another number of models, loaders or registered objects than are prepared.
    """
    named = _named(run.prepared)
    loaded = checkpointer.load(path, like=as_in(named))
    saved = loaded.replicated
    _check_same("models", named, loaded.models)
    _check_same("loaders", dict(enumerate(run.loaders)), dict(enumerate(saved["loaders"])))
    _check_same("registered objects", run.custom, saved["custom"])
    for name, one in named.items():
        one.load_state_dict({"model": loaded.models[name], **saved["training"][name]})
    run.backend.load_state_dict(saved["backend"])
    for loader, state in zip(run.loaders, saved["loaders"], strict=True):
        loader.load_state_dict(state)
    for name, obj in run.custom.items():
        obj.load_state_dict(saved["custom"][name])
    return loaded.step, loaded.path, _restore_generators(run, loaded)


def _restore_generators(run: RunState, loaded: "Loaded") -> str:
    topology = run.context.topology
    if loaded.per_rank is not None:
        load_rng_state(loaded.per_rank["rng"])
        return f"restored as saved at step {loaded.step}"
    reseed(run.seed, rank=topology.rank, step=loaded.step)
    became = (
        f"saved with world size {loaded.saved_world_size}, resumed with {topology.world_size}: reseeded from "
        f"seed {run.seed}, each rank and step {loaded.step}"
    )
    if topology.is_main:
        logger.warning("random number generators: %s", became)
    return became


def _named(prepared: Sequence[Prepared]) -> dict[str, Prepared]:
    return {"model" if i == 0 else f"model_{i}": one for i, one in enumerate(prepared)}


def _check_same(what: str, own: Mapping[Any, Any], saved: Mapping[Any, Any]) -> None:
    if set(own) != set(saved):
        raise ValueError(
            f"the checkpoint holds {what} {sorted(map(str, saved))}, and this run has {sorted(map(str, own))}; "
            "prepare and register the same ones before load_state()"
        )
