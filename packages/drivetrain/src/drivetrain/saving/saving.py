"""Decide when a run is saved, and from where it is resumed; export its models."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import nn

from drivetrain.parts.checkpointers import Checkpointers
from drivetrain.parts.parts import HasParts, Parts, needs_run
from drivetrain.plan.effective import plan_of, store_plan
from drivetrain.saving.hooks import CheckpointHook
from drivetrain.saving.registered import Registered, Stateful
from drivetrain_backends import AccumulationWindow
from drivetrain_checkpoint import RESUME_EXIT_CODE, SaveSchedule
from drivetrain_checkpoint.storage.place import Place
from drivetrain_config.settings.unread import find_unused

if TYPE_CHECKING:  # imported where a run first saves, loads or exports
    from drivetrain.saving.resume import RunState
    from drivetrain_checkpoint import ExportPlan, IncompatibleNames

logger = logging.getLogger(__name__)


class _DeferredSave(NamedTuple):
    """A save that was requested in an open accumulation window."""

    output_dir: Place | str | None
    metrics: tuple[tuple[str, float], ...]
    background: bool | None
    trained_only: bool


class Saving(HasParts):
    """The part of an Accelerator that saves and resumes runs, and exports and loads single models."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._registered = Registered()
        self._deferred: list[_DeferredSave] = []
        self._schedule: SaveSchedule | None = None
        self._has_saved = self._was_asked = self._is_told = False
        self._hooks: list[CheckpointHook] = []
        self._stop_requests: deque[str] = deque()  # other threads append to it

    @needs_run
    def register_for_checkpointing(
        self, *objects: Stateful, per_rank: bool = False, **named: Stateful
    ) -> None:
        """Register objects with `state_dict` and `load_state_dict`, to be saved and loaded with the run.

        Args:
            *objects: Objects saved under their position in the order of registration.
            per_rank: Whether each rank's own state is saved, and restored at the same number of ranks. At another
                number of ranks `load_state` raises an error, unless the object has a method
                `load_state_dicts(states)`, which receives the states of all ranks that saved, in rank order. If
                false, rank 0's state is saved for all ranks, and a save warns where another rank's state differs.
            **named: Objects saved under a name, which does not depend on the order of registration.

        Raises:
            TypeError: An object cannot be saved.
            ValueError: A name is taken.
        """
        self._registered.add(objects, named, per_rank=per_rank)

    def unregister_from_checkpointing(self, *objects: object) -> None:
        """Take objects out of later checkpoints; their names are free again. Called on all ranks."""
        self._registered.remove(objects)

    @needs_run
    def register_checkpoint_hook(self, hook: CheckpointHook) -> None:
        """Register a hook to run before and after each save and load. Called on all ranks."""
        self._hooks.append(hook)

    @needs_run
    def save_state(
        self,
        output_dir: Place | str | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        background: bool | None = None,
        trained_only: bool = False,
        at_once: bool = False,
    ) -> Place | None:
        """Save models, optimizers, schedulers, loader positions, generators and registered objects.

        Called on all ranks. A save in an open accumulation window would lose the window's gradients. Unless
        `at_once`, the save is therefore deferred until the window's step is complete: to the start of the next
        micro-batch, or the end of training.

        Args:
            output_dir: The folder or URL of the checkpoints; `project_dir`/checkpoints by default.
            metrics: Numbers that rate the checkpoint, such as `{"loss": 0.3}`, for the setting `keep_best`.
            background: Whether training continues while the checkpoint is written; None takes the setting. The next
                save or load, `wait_for_save` and `end_training` wait for the write and raise its error.
            trained_only: Whether frozen parameters are left out, such as the base model under adapters. A run that
                loads the checkpoint already has them, and `load_state` leaves them unchanged.
            at_once: Whether to save even in an open window, without the window's gradients. A resumed run reads the
                window's micro-batches again, with other random numbers.

        Returns:
            The folder of this checkpoint; None if the save was deferred.

        Raises:
            RuntimeError: Nothing was prepared or registered.
            OtherRankFailedError, OSError, StateError: The save failed on a rank; nothing was committed.
        """
        from drivetrain.saving import resume

        checkpointer = self._parts.checkpointers.of(output_dir)  # raises at once if there is no folder
        self._check_prepared("save_state")
        if metrics is not None and not isinstance(cast("object", metrics), Mapping):
            raise TypeError(f'metrics={metrics!r}: give numbers by name, such as {{"loss": 0.3}}')
        if not (at_once or self._parts.backend.window.closing):
            asked = _DeferredSave(output_dir, tuple((metrics or {}).items()), background, trained_only)
            self._deferred.append(asked)
            return None
        self._has_saved = True
        run = self._run_state()
        for hook in self._hooks:
            hook.before_save(run.step)
        checkpointer.after_commit = [hook.after_commit for hook in self._hooks]
        path = resume.save(
            run,
            checkpointer,
            plan=plan_of(self._parts).as_dict(),
            metrics=metrics,
            background=background,
            trained_only=trained_only,
        )
        if checkpointer.is_copying:
            wait = partial(_copies_are_over, self._parts.backend.window, self._parts.checkpointers)
            for optimizer in run.optimizers:
                optimizer.before_step = wait  # not a bound method: the Accelerator holds the optimizers
        return path

    @needs_run
    def save_if_due(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        background: bool | None = None,
        trained_only: bool = False,
    ) -> Place | None:
        """Save if a save is due; call it at the end of the loop's body. Called on all ranks.

        A save is due after `save_every_steps` or `save_every_minutes`, by rank 0's clock. It is also due once any
        rank has received one of `save_on_signals` or called `request_stop`; then the program ends when the save is
        committed. The first call starts to listen for signals. All ranks save after the same step, never in an open
        window.

        Args:
            metrics: Numbers that rate the checkpoint; see `save_state`.
            background: Whether training continues while the checkpoint is written; see `save_state`.
            trained_only: Whether frozen parameters are left out; see `save_state`.

        Returns:
            The folder of the checkpoint; None if no save was due.

        Raises:
            SystemExit: A signal was received, or `request_stop` called; the exit code is `RESUME_EXIT_CODE`. Restart
                the run to continue.
            OtherRankFailedError, OSError, StateError: The save failed on a rank; nothing was committed.
        """
        self._was_asked = True
        if not self._parts.backend.window.closing:
            return None
        if self._schedule is None:
            self._schedule = SaveSchedule(self.context, self._parts.resolved["checkpoint"].value)
        while self._stop_requests:
            self._schedule.request_stop(self._stop_requests.popleft())
        step = self._run_state().step
        if (due := self._schedule.due(step)) is None:
            return None
        # Before the program ends, the save must be committed.
        path = self.save_state(
            metrics=metrics, background=False if due.stop else background, trained_only=trained_only
        )
        if due.stop is None:
            return path
        if self.context.topology.is_main:
            logger.warning(
                "%s: saved at step %s; the program ends; start it again to continue", due.stop, step
            )
        raise SystemExit(RESUME_EXIT_CODE)

    @needs_run
    def request_stop(self, reason: str) -> None:
        """Ask all ranks to save after the same step and to end: their next calls of `save_if_due` do so.

        May be called on any rank, by any thread, such as that of a `MemoryGuard`.

        Args:
            reason: The reason why the run ends, for the log.
        """
        self._stop_requests.append(reason)

    def wait_for_save(self) -> None:
        """Wait until background saves are committed. Called on all ranks.

        Raises:
            OtherRankFailedError, OSError: A save failed; nothing of it was committed.
        """
        self._parts.checkpointers.wait()

    @needs_run
    def load_state(
        self, input_dir: Place | str | None = None, *, kept_models: Sequence[nn.Module] = ()
    ) -> int:
        """Resume a saved run, at the same or another number of ranks. Called on all ranks, after `prepare`.

        A folder that Accelerate's `save_state` wrote is loaded too; a warning lists what could not be restored.

        Args:
            input_dir: The folder or URL of a checkpoint or of several: then the newest valid checkpoint is loaded.
                `project_dir`/checkpoints by default.
            kept_models: Prepared or registered models that keep their present weights, such as weights that the
                program has loaded itself. Their optimizers are loaded. Pass the same models on all ranks.

        Returns:
            The optimizer step of the checkpoint.

        Raises:
            ValueError: The checkpoint holds other objects than the run, or the run does not have a kept model.
        """
        from drivetrain.saving import resume
        from drivetrain.saving.other_formats import find_other_format

        self._check_prepared("load_state")
        self.wait_for_save()
        for hook in self._hooks:
            hook.before_load()
        registered = self._registered.shared.values()
        kept = [  # what holds a model's weights in a run's state
            each if any(each is one for one in registered) else self._parts.prepared.of(each)
            for each in kept_models
        ]
        run = replace(self._run_state(), kept=kept)
        checkpointer = self._parts.checkpointers.of(input_dir)
        other = find_other_format(self.context, checkpointer.directory)
        if other is not None:
            other_format, folder = other
            step, became = other_format.load(run, folder)
        else:
            step, path, became = resume.load(run, checkpointer, input_dir)
            self._parts.checkpointers.of(path.parent).continues = True
        self._parts.facts["random generators"] = became
        self._parts.trackers.expect_repeated_steps()
        if self.context.topology.is_main:
            store_plan(plan_of(self._parts), self._parts.settings)
        for hook in self._hooks:
            hook.after_load(step)
        return step

    @needs_run
    def save_model(
        self,
        model: nn.Module,
        folder: Path | str,
        *,
        max_shard_size: int | str = "5GB",
        metadata: Mapping[str, str] | None = None,
        trained_only: bool = False,
    ) -> "ExportPlan":
        """Write a model's weights and buffers as safetensors, as `from_pretrained` reads them. Called on all ranks.

        The main process gathers and writes the tensors, and holds the tensors of one file at a time. An existing
        export in the folder is replaced once the new one is complete; see `drivetrain_checkpoint.write_export`.

        Args:
            model: A prepared model.
            folder: The destination folder, created if missing.
            max_shard_size: The maximum size of one file's tensors, in bytes or as "5GB", "512MiB".
            metadata: The metadata written into the header of every file.
            trained_only: Whether frozen parameters and all buffers are left out. Of a PEFT model, the adapters are
                written as its own `save_pretrained` writes them, for `PeftModel.from_pretrained`.

        Returns:
            The plan of which file holds which tensor.

        Raises:
            StateError: The model's state holds a value that cannot be stored.
            ValueError: The size is invalid; no parameter is trained; or the model is a PEFT model and `trained_only`
                is false, which would write names that no reader knows.
            RuntimeError: Another rank failed; the message holds its error. An earlier export is unchanged.
        """
        from drivetrain.saving import exports

        for hook in self._hooks:
            hook.before_export()
        return exports.save(
            self._parts.prepared.of(model),
            self.context,
            Path(folder),
            max_shard_size=max_shard_size,
            metadata=metadata or {},
            trained_only=trained_only,
        )

    @needs_run
    def load_model(self, model: nn.Module, folder: Path | str, *, strict: bool = True) -> "IncompatibleNames":
        """Load an export into a prepared model, without changing its optimizers. Called on all ranks.

        Where a backend's parameters are writable, only the main process reads, one tensor at a time; otherwise
        (DeepSpeed from stage 1 on) all ranks read. Module state other than tensors is unchanged.

        Args:
            model: A prepared model.
            folder: The folder written by `save_model` or by transformers' `save_pretrained`.
            strict: Whether the names in the export must match the model's.

        Returns:
            The names that only the model or only the export has; none if `strict`.

        Raises:
            NoCheckpointError: The folder holds no export.
            CorruptCheckpointError: A file is missing or damaged; the message names it.
            ValueError: Names or shapes differ from the model's.
            RuntimeError: Another rank failed; the message holds its error. In all of these cases nothing was
                loaded.
        """
        from drivetrain.saving import exports

        self._parts.checkpointers.wait_for_copies()
        return exports.load(self._parts.prepared.of(model), self.context, Path(folder), strict=strict)

    def _save_deferred(self) -> None:
        """Make the deferred saves if the window has closed. Called on all ranks."""
        if not self._parts.backend.window.closing:
            return
        deferred, self._deferred = self._deferred, []
        for one in dict.fromkeys(deferred):  # equal requests in one window make one save
            self.save_state(
                one.output_dir,
                metrics=dict(one.metrics) or None,
                background=one.background,
                trained_only=one.trained_only,
            )

    def _drop_deferred(self) -> None:
        """Drop the deferred saves, with a warning."""
        if self._deferred:
            logger.warning(
                "training ended in an open accumulation window: the save requested in it was not made"
            )
            self._deferred = []

    def _tell_unused(self) -> None:
        """Warn once of settings that nothing read, if the run has trained."""
        if not self._is_told and self.context.topology.is_main and self._run_state().step:
            places = [each.directory for each in self._parts.checkpointers]
            events = {
                "a prepared loader": bool(self._parts.prepared.loaders),
                "a checkpoint": bool(places),
                "a checkpoint at a URL": any(not isinstance(place, Path) for place in places),
                "a save": self._has_saved,
                "a call of save_if_due()": self._was_asked,
            }
            for one in find_unused(self._parts.resolved, [name for name, was in events.items() if was]):
                logger.warning("%s", one)
        self._is_told = True

    def _check_prepared(self, name: str) -> None:
        """Check that the run has something to save or load."""
        prepared = self._parts.prepared
        if not (prepared.models or prepared.loaders or self._registered):
            raise RuntimeError(f"{name}() before prepare(): this run has no state yet; prepare models first")

    def _run_state(self) -> "RunState":
        from drivetrain.saving.resume import RunState

        parts = self._parts
        return RunState(
            context=parts.context,
            shard=parts.shard.index,
            prepared=parts.prepared.models,
            optimizers=parts.prepared.optimizers,
            schedulers=parts.prepared.schedulers,
            backend=parts.backend,
            loaders=parts.prepared.loaders,
            registered=self._registered,
            seed=parts.settings.seed,
            fp8=parts.fp8,
            dtypes=parts.policy.dtypes,
        )


def _copies_are_over(window: AccumulationWindow, checkpointers: Checkpointers) -> bool:
    """Wait for a background save's copies before a step changes tensors; return False in an open window."""
    if not window.closing:
        return False
    checkpointers.wait_for_copies()
    return True
