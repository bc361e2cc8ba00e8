"""Build the parts of an Accelerator from its settings; only this module knows all of them."""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from drivetrain.parts.checkpointers import Checkpointers
from drivetrain.parts.loop_words import LoopWords
from drivetrain.parts.open_backend import AUTO, OpenBackend, leaves_open
from drivetrain.parts.parts import Parts
from drivetrain.parts.prepared import PreparedObjects
from drivetrain.parts.sections import Sections
from drivetrain.plan.effective import plan_of, store_plan
from drivetrain.plan.global_batch import scale_accumulation, warn_if_changed
from drivetrain.settings import RunSettings, usual_backend
from drivetrain_backends import AccumulationWindow, Backend, BackendRegistry, SupportsWaitWatch
from drivetrain_backends.modules.block_changes import BlockChanges
from drivetrain_config import ConfigError, Layers
from drivetrain_config.settings.unread import find_unread
from drivetrain_data import LoaderTracker, Shard
from drivetrain_precision import Fp8Recipe, Policy, PrecisionError, choose_policy
from drivetrain_state import Context, connect
from drivetrain_tracking import Tracker, TrackerGroup, TrackingSettings, make_trackers

logger = logging.getLogger(__name__)


def compose(
    *,
    run: Mapping[str, object | None],
    sections: Mapping[str, object],
    backend_class: type[Backend] | None,
    registry: BackendRegistry,
    layers: Layers,
    trackers: Sequence[Tracker] = (),
    fp8_recipe: Fp8Recipe | str | None = None,
) -> Parts:
    """Resolve every section and build the parts. Called on all ranks.

    Args:
        run: The run section's fields as given in code; None means not given.
        sections: Other sections as given in code, by name: dataclasses or mappings of fields.
        backend_class: A backend class given in code, instead of a name.
        registry: The registry that maps a backend's name to its class.
        layers: The settings from outside the program.
        trackers: Tracker objects, in addition to the trackers that the run section names.
        fp8_recipe: The recipe of fp8 or its name, instead of the one that the precision section names.

    Raises:
        ConfigError: A setting is unknown or out of range; the message names its source.
    """
    given = Sections(run, sections, layers)
    is_auto = given.run.backend == AUTO
    named = backend_class or (
        None if is_auto or given.run.backend is None else registry.get(given.run.backend)
    )
    needs_group = is_auto or (named is not None and named.needs_group)
    # Reports of hangs go into the project's folder by default.
    state = replace(
        given.state, hang_report_directory=given.state.hang_report_directory or given.run.project_dir
    )
    if named is not None and named.settings_section is not None:
        refused = getattr(named.settings_type, "refused_axes", {})
        given.parallel.check_axes(named.settings_section, refused)
    parallelism = given.parallel if given.parallel.is_said else None
    context = connect(state, parallelism=parallelism, needs_group=needs_group)
    with ExitStack() as undo:
        undo.callback(context.close)  # a failure below must not leave a process group behind
        num_ranks, num_shards = context.ranks("counts").size, context.ranks("shard").size
        backend_class = named or registry.get(usual_backend(num_ranks, num_shards))
        parts = _build(context, backend_class, registry, given, trackers, fp8_recipe)
        backends = registry.names()  # once: to find them reads a file of each installed package
        given.others(backends)  # which must be known, whoever reads them
        if parts.open_backend is None:
            _tell_settings(parts, given, backends)
        undo.pop_all()
    return parts


def _tell_settings(parts: Parts, given: Sections, backends: Sequence[str]) -> None:
    """Warn of settings that disagree, and of those without effect under the backend of the run."""
    disagreements = [each for section in parts.resolved.values() for each in section.disagreements]
    asked = given.run.mixed_precision
    unread = find_unread(
        parts.resolved,
        given.others(backends),
        backends=backends,
        backend=type(parts.backend).__name__,
        run={
            "run.mixed_precision": parts.policy.mode if asked == "auto" else asked,
            "run.on_nonfinite": given.run.on_nonfinite,
            "run.log_with": bool(parts.trackers.names),
        },
    )
    if unread:
        parts.facts["without effect"] = ", ".join(name for one in unread for name in one.names)
    for one in (*disagreements, *unread) if parts.context.topology.is_main else ():
        logger.warning("%s", one)


def _build(
    context: Context,
    backend_class: type[Backend],
    registry: BackendRegistry,
    given: Sections,
    trackers: Sequence[Tracker],
    fp8_recipe: Fp8Recipe | str | None,
) -> Parts:
    """Build the parts, once the ranks are connected. A backend that is left open is the usual one for now."""
    run, is_main = given.run, context.topology.is_main
    policy = choose_policy(run.mixed_precision, context.device, given.precision, recipe=fp8_recipe)
    reads = context.ranks("reads")  # ranks outside it read the same batches as these
    shard = Shard(reads.index, reads.size)
    scaled = scale_accumulation(
        run.gradient_accumulation_steps, meant_for=run.accumulation_world_size, processes=shard.count
    )
    if is_main:
        warn_if_changed(scaled)
    window = AccumulationWindow(scaled.steps, on_nonfinite=run.on_nonfinite)

    def make(kind: type[Backend], window: AccumulationWindow, settings: Any) -> Backend:
        made = kind(context, policy, window=window, settings=settings)
        _check_applied(made, run, policy)
        _check_recipe(policy.recipe, kind, registry, is_main=is_main)
        return made

    settings = None if run.backend == AUTO else given.of_backend(backend_class)
    is_open = run.backend == AUTO or leaves_open(settings)
    # Until it is chosen, one of its kind stands in, which trains nothing: what is said may need what is not yet.
    backend = make(backend_class, window, type(settings)() if is_open and settings is not None else settings)
    reading = LoaderTracker()
    # Sections refuses names of trackers without a project_dir.
    named = make_trackers(run.log_with, run.project_dir or "", settings=given.tracking)
    parts = Parts(
        resolved=given.resolved,
        context=context,
        shard=shard,
        policy=policy,
        backend=backend,
        changes=BlockChanges(given.model),
        prepared=PreparedObjects([reading.mark_stepped]),
        reading=reading,
        checkpointers=Checkpointers(context, given.checkpoint, run.project_dir),
        trackers=TrackerGroup([*named, *trackers], is_main=is_main, settings=given.tracking),
    )
    if is_main:
        _add_words(parts, window)
    if given.tracking.measures_throughput:
        _add_watch(parts, window, given.tracking)
    if policy.recipe is not None:
        _add_fp8(parts, policy.recipe)
    if is_open:
        parts.open_backend = OpenBackend(
            sections=given,
            registry=registry,
            named=None if run.backend == AUTO else backend_class,
            make=make,
            on_chosen=partial(_tell_settings, parts, given, registry.names()),
        )
    return parts


def _add_words(parts: Parts, window: AccumulationWindow) -> None:
    """Add the words about the loop."""
    # An empty log_with in code, a file or the environment is meant.
    is_meant = parts.resolved["run"].sources["log_with"].kind != "default"
    keeps_logs = is_meant or bool(parts.trackers.names)
    parts.words = LoopWords(parts.prepared, window, parts.reading, parts.shard, keeps_logs=keeps_logs)


def _add_watch(parts: Parts, window: AccumulationWindow, settings: TrackingSettings) -> None:
    """Add what measures the throughput."""
    from drivetrain_parallel import expert_counts
    from drivetrain_throughput.step_watch import StepWatch

    watch = StepWatch(
        context=parts.context,
        settings=settings,
        prepared=parts.prepared,
        is_probe=lambda: window.is_probe,
        reading=parts.reading,
        trackers=parts.trackers,
        mode=parts.policy.mode,
        expert_counts=expert_counts if parts.context.ranks("expert").size > 1 else None,
    )
    parts.prepared.on_step.append(watch.end_step)
    if isinstance(parts.backend, SupportsWaitWatch):
        parts.backend.watch_waits(watch.begin_wait)
    parts.watch = watch


def _add_fp8(parts: Parts, recipe: Fp8Recipe) -> None:
    """Add what trains in fp8."""
    from drivetrain.fp8.fp8_training import Fp8Training

    facts, context = parts.facts, parts.context

    def store(found: Mapping[str, str]) -> None:
        facts.update(found)
        if context.topology.is_main:
            store_plan(plan_of(parts), parts.settings)

    policy = parts.policy
    fp8 = Fp8Training(
        recipe,
        context,
        keep_fp32=policy.dtypes.keep_fp32,
        exclude=policy.settings.fp8_exclude,
        on_count=store,
    )
    parts.prepared.on_step.append(fp8.end_step)
    parts.fp8 = fp8


def _check_applied(backend: Backend, run: RunSettings, policy: Policy) -> None:
    """Refuse settings that the backend, such as one of a third party, does not apply."""
    applied = backend.applied()
    if run.on_nonfinite != "warn" and "on_nonfinite" not in applied:
        raise ConfigError(
            f"run.on_nonfinite={run.on_nonfinite!r}: {type(backend).__name__} does not look for "
            "infinities and NaNs in gradients; leave it at 'warn', or choose another backend"
        )
    said = policy.dtypes.said()
    if missing := [name for name in said if name not in applied]:
        listed = ", ".join(f"precision.{name}={said[name]!r}" for name in missing)
        raise ConfigError(
            f"{listed}: {type(backend).__name__} does not apply it; leave it out, or choose another backend"
        )


def _check_recipe(
    recipe: Fp8Recipe | None, backend: type[Backend], registry: BackendRegistry, *, is_main: bool
) -> None:
    """Refuse an fp8 recipe that does not allow the backend, and warn of an untested combination."""
    if recipe is None:
        return
    needed = recipe.requirements
    if needed.backends is not None and not _is_one_of(backend, needed.backends, registry):
        raise PrecisionError(
            f"fp8_recipe={recipe.name!r}: {needed.library}'s layers have not been run under {backend.__name__}, only "
            f"backend={' or '.join(map(repr, needed.backends))} is accepted; choose one of these, or a recipe of "
            "another library, such as 'torchao_rowwise'"
        )
    if is_main and _is_one_of(backend, needed.untried_backends, registry):
        logger.warning(
            "fp8_recipe=%r under %s: the project's tests have not run %s's layers on several GPUs; take the first "
            "run as a trial",
            recipe.name,
            backend.__name__,
            needed.library,
        )


def _is_one_of(backend: type[Backend], names: Collection[str], registry: BackendRegistry) -> bool:
    return any(backend is registry.get(name) for name in names)
