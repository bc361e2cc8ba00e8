"""The state of a run: save it under fixed names, and load it again."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.parts.run_seed import seed_of_run
from drivetrain.plan.global_batch import step_sizes, warn_if_resumed_otherwise
from drivetrain.saving.divided import as_in, mark_replicas, name_parameters
from drivetrain.saving.registered import Mergeable, Registered, Stateful, check_loadable, gathered_states
from drivetrain_backends import (
    Backend,
    Prepared,
    PreparedOptimizer,
    PreparedScheduler,
    SupportsReplicas,
    is_packed,
    packed_entries,
)
from drivetrain_checkpoint import Checkpointer
from drivetrain_checkpoint.storage.place import Place
from drivetrain_data import ShardedLoader
from drivetrain_precision import DtypePolicy
from drivetrain_precision.dtypes.saved_dtypes import find_conversions
from drivetrain_state import Context, ProgressMark, load_rng_state, reseed, rng_state
from drivetrain_state.collectives.operations import broadcast_object

if TYPE_CHECKING:
    from drivetrain.fp8.fp8_training import Fp8Training
    from drivetrain_checkpoint import LoadResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The live objects whose state a checkpoint holds.

    Attributes:
        context: The ranks and device.
        shard: The index of the shard of the data that this rank reads.
        prepared: The models with their optimizers and schedulers, in the order they were prepared.
        optimizers: All optimizers, in the order they were prepared.
        schedulers: All schedulers, in the order they were prepared.
        backend: The backend that trains the models.
        loaders: The prepared loaders, in the order they were prepared.
        registered: The objects registered for checkpointing.
        seed: The seed of the settings, for generators whose saved state does not fit the number of ranks; None if the
            settings have no seed.
        fp8: The training of the models in fp8; None in other precisions.
        dtypes: The dtypes that the run holds its models in.
        kept: The prepared and registered models whose weights a load leaves as they are.
    """

    context: Context
    shard: int
    prepared: Sequence[Prepared]
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[PreparedScheduler]
    backend: Backend
    loaders: Sequence[ShardedLoader[Any]]
    registered: Registered
    seed: int | None
    dtypes: DtypePolicy
    fp8: "Fp8Training | None" = None
    kept: Sequence[object] = ()

    def keeps(self, model: object) -> bool:
        """Return whether a load leaves a model's weights as they are."""
        return any(model is each for each in self.kept)

    @property
    def custom(self) -> Mapping[str, Stateful]:
        """The registered objects with one state for all ranks, by name."""
        return self.registered.shared

    @property
    def step(self) -> int:
        """The optimizer step: the highest step count of all optimizers."""
        return max((optimizer.num_steps for one in self.prepared for optimizer in one.optimizers), default=0)


def save(
    run: RunState,
    checkpointer: Checkpointer,
    *,
    plan: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    background: bool | None = None,
    trained_only: bool = False,
) -> Place:
    """Save a run between accumulation windows, without frozen parameters if `trained_only`. Called on all ranks.

    Raises:
        DriftedReplicasError: Ranks hold different weights of a replicated model; nothing was saved. The error of a
            background save is raised by the next call that waits for the save.
        ValueError: The save would include packed weights.
        RuntimeError: Ranks have registered different objects; nothing was written.
    """
    run.context.progress.note(ProgressMark.CHECKPOINT)
    models: dict[str, Any] = {}
    training: dict[str, Any] = {}
    for name, one in _name_models(run.prepared).items():
        state = mark_replicas(one.state_dict(), one)
        model = state.pop("model")
        if not trained_only:
            _check_unpacked(one)
        left_out = (
            frozen_names(one) | packed_entries(one.unwrap(), model) if trained_only else frozenset[str]()
        )
        models[name] = {key: value for key, value in model.items() if key not in left_out}
        training[name] = state
    custom = {name: obj.state_dict() for name, obj in run.custom.items()}
    run.registered.compare(custom, run.context)
    own = {name: obj.state_dict() for name, obj in run.registered.per_rank.items()}
    # Without optimizers nothing steps: every batch received so far counts as done.
    trains = any(one.optimizers for one in run.prepared)
    replicated: dict[str, Any] = {
        "training": training,
        "backend": run.backend.state_dict(),
        "loaders": [loader.state_dict(stepped=trains) for loader in run.loaders],
        "custom": custom,
        "step_sizes": step_sizes(run.loaders, run.backend.window.next_num_micro_batches),
        **({"trained_only": True} if trained_only else {}),
    }
    per_rank: dict[str, Any] = {"rng": rng_state(), **({"custom": own} if own else {})}
    if run.fp8 is not None:
        replicated["fp8"] = run.fp8.state_dict()
        if run.fp8.keeps_state():  # of its own batches, each rank saw other ranges than its peers
            per_rank["fp8"] = replicated["fp8"]
    if own:
        replicated["per_rank"] = gathered_states(own, run.registered.per_rank, run.context)
    run.context.progress.mark(ProgressMark.SAVE)
    path = checkpointer.save(
        run.step,
        models=models,
        replicated=replicated,
        per_rank=per_rank,
        plan=plan,
        metrics=metrics,
        background=background,
        changes_in_step=_changes_in_step(run),
        replicas=run.backend.replicas() if isinstance(run.backend, SupportsReplicas) else None,
    )
    run.context.progress.mark(ProgressMark.SAVED)
    run.context.progress.note(ProgressMark.CHECKPOINT_DONE)
    return path


def _check_unpacked(one: Prepared) -> None:
    """Refuse to save all weights if some are packed, such as the 4-bit base model under adapters."""
    packed = {name: each for name, each in one.unwrap().named_parameters() if is_packed(each)}
    if packed:
        name, weight = next(iter(packed.items()))
        library = type(weight).__module__.partition(".")[0]
        raise ValueError(
            f"save_state(): {name!r} (and {len(packed) - 1} more) is packed by {library}, whose scales "
            "could not be loaded into it: save_state(trained_only=True) leaves out frozen weights; the run "
            "that loads the checkpoint builds the same base model"
        )


def _changes_in_step(run: RunState) -> Callable[[str], bool]:
    """Return a function from a tensor's name in the checkpoint to whether only optimizer steps change the tensor.

    True for parameters and optimizer states. False for options of parameter groups: a scheduler may write them, such
    as a learning rate that is a tensor.
    """
    parameters = {
        f"models/{name}/{parameter}"
        for name, one in _name_models(run.prepared).items()
        for parameter in name_parameters(one)
    }
    return lambda name: name in parameters or (name.startswith("replicated/training/") and "/state/" in name)


def load(run: RunState, checkpointer: Checkpointer, path: Place | str | None) -> tuple[int, Place, str]:
    """Load a saved run. Called on all ranks.

    Returns:
        The optimizer step of the checkpoint, the checkpoint's folder, and how the random number generators were
        restored, for the plan.

    Raises:
        ValueError: The checkpoint holds other models, loaders or registered objects than the run, or weights that
            would be rounded although no setting allows it.
    """
    named = _name_models(run.prepared)
    held = {name: one.state_dict()["model"] for name, one in named.items()}
    own = {name: held[name] for name, one in named.items() if run.keeps(one)}
    loaded = checkpointer.load(path, like=as_in(held, run.custom))
    saved = loaded.replicated
    _check_same("models", named, loaded.models)
    _check_same("loaders", dict(enumerate(run.loaders)), dict(enumerate(saved["loaders"])))
    _check_same("registered objects", run.custom, saved["custom"])
    per_rank, ranked = run.registered.per_rank, saved.get("per_rank", {})
    _check_same("objects registered with per_rank=True", per_rank, ranked)
    check_loadable(
        per_rank,
        ranked,
        saved_world_size=loaded.saved_world_size,
        world_size=run.context.topology.world_size,
    )
    models = own | {
        name: _fill(one, loaded.models[name], saved) for name, one in named.items() if name not in own
    }
    for name, one in named.items():
        converted = find_conversions(
            models[name], held[name], run.dtypes, parameters=name_parameters(one).keys()
        )
        if converted and run.context.topology.is_main:
            logger.warning(
                "%d tensors of %s are converted from the checkpoint's dtypes to this run's, such as %s from %s",
                *(len(converted), type(one.unwrap()).__name__, *next(iter(converted.items()))),
            )
    for name, one in named.items():
        one.load_state_dict({"model": models[name], **saved["training"][name]})
    run.backend.load_state_dict(saved["backend"])
    if run.fp8 is not None:
        # With another number of ranks, all of them take what the first one kept.
        run.fp8.load_state_dict((loaded.per_rank or {}).get("fp8", saved.get("fp8", {})))
    for loader, state in zip(run.loaders, saved["loaders"], strict=True):
        loader.load_state_dict(state)
    if run.context.topology.is_main:
        micro_batches = run.backend.window.next_num_micro_batches
        warn_if_resumed_otherwise(saved.get("step_sizes", {}), run.loaders, micro_batches)
    for name, obj in run.custom.items():
        if not run.keeps(obj):
            obj.load_state_dict(saved["custom"][name])
    for name, obj in per_rank.items():
        if loaded.per_rank is not None:
            obj.load_state_dict(loaded.per_rank["custom"][name])
        elif isinstance(obj, Mergeable):
            obj.load_state_dicts(ranked[name])
    return loaded.step, loaded.path, _restore_generators(run, loaded)


def frozen_names(prepared: Prepared) -> frozenset[str]:
    """Return the names of the frozen parameters."""
    named = name_parameters(prepared).items()
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def _fill(one: Prepared, saved_model: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved model's state, completed with this run's values of frozen parameters that were left out.

    Raises:
        ValueError: A parameter that was left out is trained in this run.
    """
    if not saved.get("trained_only", False):
        return saved_model
    own = one.state_dict()["model"]
    # A packed weight keeps its scales, which are entries of the state that nothing loads.
    missing = own.keys() - saved_model.keys() - packed_entries(one.unwrap(), own)
    if trained := sorted(missing - frozen_names(one)):
        raise ValueError(
            "the checkpoint was saved with trained_only=True, and lacks parameters that were frozen then but are "
            f"trained here: {trained[:5]}; freeze the same parameters before prepare()"
        )
    return {**saved_model, **{name: own[name] for name in missing}}


def reseed_generators(run: RunState, *, saved_world_size: int, step: int) -> str:
    """Reseed the generators, since states saved on another number of ranks fit no rank. Called on all ranks.

    As in `draw_by_shard`, torch draws different numbers for each shard; Python and NumPy draw the same on all ranks.

    Returns:
        A description of the reseeding, for the plan.
    """
    topology = run.context.topology
    seed, source = broadcast_object(run.context, seed_of_run(run.seed))
    reseed(seed, rank=0, step=step)
    if run.shard:
        reseed(seed, rank=run.shard, step=step, torch_alone=True)
    return (
        f"saved with world size {saved_world_size}, resumed with {topology.world_size}: reseeded from seed {seed} "
        f"({source}), step {step} and each rank's shard of the data"
    )


def _restore_generators(run: RunState, loaded: "LoadResult") -> str:
    if loaded.per_rank is not None:
        load_rng_state(loaded.per_rank["rng"])
        return f"restored as saved at step {loaded.step}"
    became = reseed_generators(run, saved_world_size=loaded.saved_world_size, step=loaded.step)
    if run.context.topology.is_main:
        logger.warning("random number generators: %s", became)
    return became


def _name_models(prepared: Sequence[Prepared]) -> dict[str, Prepared]:
    return {"model" if i == 0 else f"model_{i}": one for i, one in enumerate(prepared)}


def _check_same(what: str, own: Mapping[Any, Any], saved: Mapping[Any, Any]) -> None:
    if set(own) != set(saved):
        raise ValueError(
            f"the checkpoint holds {what} {sorted(map(str, saved))}, and this run has {sorted(map(str, own))}; "
            "prepare and register the same objects before load_state()"
        )
