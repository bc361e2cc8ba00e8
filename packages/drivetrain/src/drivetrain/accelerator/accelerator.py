"""The Accelerator, the one object between a training loop and the hardware it runs on.

`compose.py` builds its parts. Every method hands its arguments to the part that implements the method. Each base
class holds the methods of one subject.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self

import torch
from torch import Tensor, nn

from drivetrain.accelerator.accumulate import MicroBatch
from drivetrain.accelerator.choose_trackers import LogWith, split_log_with
from drivetrain.accelerator.compose import compose
from drivetrain.accelerator.foreign_names import refuse_arguments, refuse_attribute
from drivetrain.accelerator.half_check import HalfCheck
from drivetrain.accelerator.loss_watch import LossWatch
from drivetrain.accelerator.ranks import Ranks
from drivetrain.accelerator.results import Results
from drivetrain.accelerator.training import Training
from drivetrain.hub.hub import Hub
from drivetrain.parts.parts import Parts, needs_run
from drivetrain.parts.sections import read_layers, sections_in_code
from drivetrain.prepare.prepare import prepare_objects
from drivetrain.saving.saving import Saving
from drivetrain.settings import RunSettings
from drivetrain_backends import AccumulationError, Backend, BackendRegistry, BackwardOptions, full_model
from drivetrain_backends.gradients.reducer import ONCE
from drivetrain_backends.train_step import StepLoss, TrainStepResult, train_step
from drivetrain_config import Layers
from drivetrain_data import DataSettings, ShardedLoader, skip_first_batches
from drivetrain_data.remainder import weigh
from drivetrain_memory import free_memory
from drivetrain_precision import Fp8Recipe, NoAutocast, RecordedAutocast, autocast
from drivetrain_state import ParallelDims, ProgressMark, set_seed

if TYPE_CHECKING:  # imported where a run trains replicas apart
    from drivetrain_backends.local_updates.fragment import OuterOptimizer
    from drivetrain_backends.local_updates.local_updates import LocalUpdates
    from drivetrain_backends.weight_average import WeightAverage


class Accelerator(Ranks, Training, Saving, Hub, Results):
    """The object that prepares models, optimizers, schedulers and loaders, and runs one loop on any hardware.

    Every argument is optional; a value not given here comes from the command line, the environment, a file or the
    default, in this order. Called on all ranks.

    Args:
        mixed_precision: "no", "fp16", "bf16", "fp8", or "auto" for the best of the first three.
        fp8_recipe: The recipe of "fp8", such as `TorchaoRecipe(scaling="rowwise")`, or its name; by default, the
            one that `precision.fp8_recipe` names.
        backend: A backend's name or class, or "auto" for the one that is planned when the first model is prepared.
            By default, DDP with several ranks.
        parallelism: The parallel dimensions that the ranks are split into; all data parallel by default.
        gradient_accumulation_steps: The number of micro-batches in one optimizer step.
        data: The settings of how loaders are sharded.
        project_dir: The folder of checkpoints, logs and the effective plan.
        log_with: The trackers to log to: names such as "jsonl", "all" for every installed one, tracker objects of
            your own, or several of these.
        cpu: Whether to train on the CPU even where an accelerator is present.
        seed: The seed of every generator and of the data's order, unless `data` or a loader has a seed.
        config: A YAML, TOML or JSON file of settings, or layers of settings that were already read.
        sections: Any other settings in code, by section, such as {"ddp": {"static_graph": True}}.
        registry: Backends in addition to the installed ones, from `register_backend`.
        **foreign: Not accepted. An argument of Accelerate raises an error that names drivetrain's counterpart.

    Raises:
        TypeError: An argument is unknown.
        ConfigError: A setting is unknown or out of range; the message names its source.
        PrecisionError: The device does not support the requested precision.
        UnknownBackendError: The backend does not exist.

    Example:
        >>> accelerator = Accelerator(cpu=True, sections={"run": {"show_plan": False}})
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for batch in torch.ones(2, 8, 4):
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(model(batch).square().mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> accelerator.end_training()
    """

    def __init__(
        self,
        *,
        mixed_precision: Literal["no", "fp16", "bf16", "fp8", "auto"] | None = None,
        fp8_recipe: Fp8Recipe | str | None = None,
        backend: str | type[Backend] | None = None,
        parallelism: ParallelDims | None = None,
        gradient_accumulation_steps: int | None = None,
        data: DataSettings | Mapping[str, object] | None = None,
        project_dir: Path | str | None = None,
        log_with: LogWith | None = None,
        cpu: bool | None = None,
        seed: int | None = None,
        config: Path | str | Layers | None = None,
        sections: Mapping[str, object] | None = None,
        registry: BackendRegistry | None = None,
        **foreign: Never,
    ) -> None:
        refuse_arguments(foreign, Accelerator)
        backend_class = backend if isinstance(backend, type) else None
        tracker_names, trackers = split_log_with(log_with)
        said = {
            "mixed_precision": mixed_precision,
            "backend": backend.__name__ if isinstance(backend, type) else backend,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "project_dir": Path(project_dir) if isinstance(project_dir, str) else project_dir,
            "log_with": tracker_names,
            "cpu": cpu,
            "seed": seed,
        }
        parts = compose(
            run=said,
            sections=sections_in_code(sections, data=data, parallel=parallelism),
            backend_class=backend_class,
            registry=registry or BackendRegistry(),
            layers=read_layers(config),
            trackers=trackers,
            fp8_recipe=fp8_recipe,
        )
        super().__init__(parts)
        checks_half = parts.resolved["precision"].value.check_half
        is_main = parts.context.topology.is_main
        self._half_check = HalfCheck(parts.prepared, is_main=is_main) if checks_half else None
        # A loss scale skips such steps itself.
        is_watched = is_main and self.settings.on_nonfinite == "warn" and parts.policy.mode != "fp16"
        self._loss_watch = LossWatch(parts) if is_watched else None
        self._micro_batch = MicroBatch(parts, check=self._half_check)
        if self.settings.seed is not None:
            set_seed(self.settings.seed)

    if not TYPE_CHECKING:  # else a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            refuse_attribute(name)
            return object.__getattribute__(self, name)  # raises the usual AttributeError

        def __setattr__(self, name: str, value: object) -> None:
            if not name.startswith("_") and not hasattr(type(self), name):
                refuse_attribute(name)
            object.__setattr__(self, name, value)

    def __del__(self) -> None:
        # None where the constructor failed. Not getattr: __getattr__ imports, which an ending interpreter cannot.
        parts: Parts | None = self.__dict__.get("_parts")
        if parts is not None:
            parts.prepared.untie()
            if parts.watch is not None:
                parts.watch.close()
            if parts.fp8 is not None:
                parts.fp8.close()

    @property
    def settings(self) -> RunSettings:
        """The resolved settings of the run."""
        return self._parts.settings

    @property
    def mixed_precision(self) -> str:
        """The precision in use, such as "bf16"."""
        return self._parts.policy.mode

    @property
    def fp8_recipe(self) -> Fp8Recipe | None:
        """The recipe by which linear layers compute in fp8; None in other precisions."""
        return self._parts.policy.recipe

    @needs_run
    def prepare(self, *objects: Any) -> Any:
        """Prepare models, optimizers, schedulers and loaders. Called on all ranks with the same kinds of objects.

        Args:
            *objects: nn.Module, Optimizer, scheduler or DataLoader, in any order. An optimizer may come in the same
                call as its model, or in a later one.

        Returns:
            The prepared objects in the order given; a single object is returned by itself.

        Raises:
            TypeError: An object is of a kind that cannot be prepared.
            ValueError: An object is already prepared.
            PairingError: An optimizer belongs to no prepared model, or a scheduler to no prepared optimizer.
            PlanMismatchError: A setting could not be applied as requested.
        """
        results = prepare_objects(objects, self._parts)
        if self._parts.words is not None:
            self._parts.words.watch()
        return results[0] if len(results) == 1 else tuple(results)

    def unwrap_model(self, model: nn.Module, *, keep_autocast: bool = True) -> nn.Module:
        """Return the module as the user built it, with the trained parameters.

        Args:
            model: A prepared model. From any other model, `DataParallel` and `DistributedDataParallel` are removed,
                with torch.compile's wrapper around them; a model without these wrappers is returned unchanged.
            keep_autocast: Whether the module's forward computes in the run's precision. If false, the result is a
                shallow copy of the user's own class on the same parameters; the model in training is unchanged.
        """
        return self._parts.prepared.unwrap(model, keep_autocast=keep_autocast)

    @needs_run
    def gathered(self, model: nn.Module, *, write: bool = False) -> AbstractContextManager[None]:
        """Run the block with a model's full parameters on every rank, also under a backend that shards them.

        Called on all ranks.

        Args:
            model: A prepared model.
            write: Whether rank 0's writes into the parameters are kept, on all ranks. If false, the effect of a write
                is undefined.
        """
        if write:
            self._parts.checkpointers.wait_for_copies()
        return self._parts.prepared.of(model).gathered(write=write)

    def get_state_dict(self, model: nn.Module, *, everywhere: bool = False) -> dict[str, Tensor]:
        """Return a model's full weights and buffers on the CPU, as one process would have. Called on all ranks.

        Args:
            model: A prepared model.
            everywhere: Whether all ranks get the state; otherwise all but the main process get an empty dict.
        """
        return full_model(self._parts.prepared.of(model), self.context, everywhere=everywhere)

    @needs_run
    def building(self) -> AbstractContextManager[None]:
        """Run the block so that models are constructed as the backend requires, directly on its device.

        They are constructed on the host while the backend is left to the planner.
        """
        parts = self._parts
        return parts.backend.building() if parts.open_backend is None else parts.open_backend.building()

    def accumulate(self, *models: nn.Module, last: bool | None = None) -> MicroBatch:
        """Enter a micro-batch: gradients are reduced and optimizers step when its window closes.

        Args:
            *models: The models trained in the micro-batch; all prepared ones by default.
            last: Whether the micro-batch closes the window before it is full; None closes it after a loader's last
                batch. Pass a bool, the same on all ranks, if the micro-batches per batch vary.

        Returns:
            The context of the micro-batch, which is reused for every batch and cannot be nested.

        Raises:
            AccumulationError: A micro-batch is open, or a loader's last batch has too many micro-batches.
        """
        micro_batch = self._micro_batch
        if micro_batch.is_open:
            raise AccumulationError("accumulate() inside accumulate(): one micro-batch is open already")
        if self._deferred:
            self._save_deferred()
        micro_batch.models, micro_batch.last = models, last
        return micro_batch

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch closes its window."""
        return self._parts.backend.window.closing

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches in one optimizer step; set on all ranks, it applies from the next window on.

        Raises:
            AccumulationError: The number is set in an open window, or while DeepSpeed engines exist.
            TypeError, ValueError: The number is not an integer of at least 1.
        """
        return self._parts.backend.window.next_num_micro_batches

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_micro_batches: int) -> None:
        self._parts.backend.window.resize(num_micro_batches)

    @needs_run
    @contextmanager
    def no_sync(self, *models: nn.Module) -> Generator[None]:
        """Run the block without reducing the gradients of the models (all by default), as DDP's `no_sync` does."""
        with ExitStack() as stack:
            of_models = [self._parts.prepared.of(model) for model in models]
            for prepared in of_models or self._parts.prepared.models:
                stack.enter_context(prepared.no_sync())
            yield

    @needs_run
    def local_updates(
        self,
        model: nn.Module,
        *,
        every: int,
        outer: "OuterOptimizer | None" = None,
        fragments: int = 1,
        delay: int = 0,
        local_share: float = 0.5,
    ) -> "LocalUpdates":
        """Let replicas of a prepared model step apart inside `with`, and exchange weights every few steps.

        Called on all ranks, after `prepare` and before `load_state`: checkpoints hold the outer optimizer. A save or
        an export in the block exchanges all weights first, so that it is of one model. The loop in the block is the
        usual one; see docs/howto/local_updates.md.

        Args:
            model: The prepared model; the steps of its last optimizer count.
            every: The optimizer steps between two exchanges of a weight.
            outer: A function from parameters to the optimizer that steps on the replicas' mean distance (DiLoCo);
                None averages the weights (local SGD).
            fragments: The number of parts of the model, of about equal size, that are exchanged in turn.
            delay: The steps that replicas train on while an exchange is under way; 0 waits for it.
            local_share: The share of a replica's own weights that it keeps where an exchange arrives late.

        Raises:
            ValueError: A number is out of range, the mesh has no replicas that can train apart, no optimizer trains
                the model, or one holds states in few bits.
            RuntimeError: The backend, or a setting of it, does not let replicas step apart.
        """
        from drivetrain.accelerator.equal_replicas import EqualReplicas
        from drivetrain_backends.local_updates.exchange_plan import ExchangePlan
        from drivetrain_backends.local_updates.local_updates import LocalUpdates

        plan = ExchangePlan(every=every, fragments=fragments, delay=delay, local_share=local_share)
        if not (prepared := self.prepared_of(model)).optimizers:
            raise ValueError(f"local_updates of {type(model).__name__}: prepare it with its optimizer first")
        found = LocalUpdates(prepared, self.context, plan, outer)
        taken = (*self._registered.shared, *self._registered.per_rank)
        number = sum(name.startswith("local_updates_") for name in taken)
        is_divided = self.context.ranks("data").size < self.context.topology.world_size
        self.register_for_checkpointing(per_rank=is_divided, **{f"local_updates_{number}": found})
        self.register_checkpoint_hook(EqualReplicas(found))
        return found

    @needs_run
    def ema(
        self,
        model: nn.Module,
        *,
        decay: float | None = 0.999,
        warmup: int = 0,
        every: int = 1,
        start: int = 0,
    ) -> "WeightAverage":
        """Keep an average of a prepared model's weights over its steps, in checkpoints too. Called on all ranks.

        Called after `prepare` and before `load_state`. Each rank keeps what it holds of the model, in fp32.
        `with ema.applied():` has the model hold the average, to evaluate or to export it; see docs/howto/ema.md.

        Args:
            model: The prepared model; the steps of its last optimizer count. Without one, call `ema.update()`.
            decay: The share of the average that stays at each step; None for the mean of all updates, which is
                stochastic weight averaging.
            warmup: The steps over which the decay rises: at step n it is at most (1 + n) / (warmup + n).
            every: The steps between two updates, each of which keeps `decay ** every`.
            start: The steps before the average begins.

        Raises:
            ValueError: A number is out of range.
        """
        from drivetrain_backends.weight_average import WeightAverage

        prepared = self.prepared_of(model)
        found = WeightAverage(prepared, decay=decay, warmup=warmup, every=every, start=start)
        number = sum(name.startswith("ema_") for name in self._registered.shared)
        self.register_for_checkpointing(per_rank=False, **{f"ema_{number}": found})
        return found

    def backward(
        self,
        loss: Tensor,
        *,
        count: Tensor | float | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        loader: ShardedLoader[Any] | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Accumulate the gradients of a loss. Called on all ranks.

        Args:
            loss: A loss of shape (): a mean over this rank's micro-batch or, with `count`, a sum over `count` items.
            count: The number of items that the loss sums, as a number or a tensor of shape (). The window's gradient
                is then the gradient of the mean over all items of all ranks and micro-batches, however the items are
                distributed. Pass 0 for a second loss over the same items.
            model: The model or models that the loss trains, where they cannot be inferred.
            loader: The loader of the batch, where two loaders are read side by side.
            retain_graph: Whether the graph is kept for another backward, on one device and under DDP.
            create_graph: Whether the gradients have a graph of their own, on one device.
            inputs: The leaves that get gradients, on one device and under DDP; None for all.

        Raises:
            AccumulationError: The call is outside accumulate() while gradients are accumulated; a window has both a
                mean and a sum; or the loss's model is unknown.
            PairingError: The loss trains a model that was not prepared, or whose optimizer was not prepared.
            TypeError, ValueError: The loss is not a scalar with a graph, or `count` is not a number of items.
        """
        parts, progress = self._parts, self.context.progress
        if not self._micro_batch.is_open:
            parts.backend.window.begin_alone()
        batch = parts.reading.plan(loader)
        if batch is not None and not batch.even:
            loss, count = weigh(loss, count, batch, parts.shard.index)
        if parts.words is not None:
            parts.words.begin_backward()
        options = ONCE
        if retain_graph or create_graph or inputs is not None:
            options = BackwardOptions(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
        is_heard = progress.is_heard
        if is_heard:
            progress.note(ProgressMark.BACKWARD)
        try:
            if model is None:
                parts.backend.backward(loss, count=count, options=options)
            else:
                owners = model if isinstance(model, Sequence) else [model]
                trained = [parts.prepared.of(one) for one in owners]
                parts.backend.backward_of(trained, loss, count=count, options=options)
        finally:
            if is_heard:
                progress.note(ProgressMark.BACKWARD_DONE)
        self._note(loss)

    def _note(self, loss: Tensor) -> None:
        if self._loss_watch is not None:
            self._loss_watch.note(loss)

    def train_step(
        self,
        batch: Any,
        *,
        loss: StepLoss,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        last: bool | None = None,
    ) -> TrainStepResult:
        """Train a model on a micro-batch: what the loop with `accumulate` does, in one call. Called on all ranks.

        If the micro-batch closes its window, this clips, steps the model's optimizers and schedulers, and clears.

        Args:
            batch: The batch, which is passed to `loss`.
            loss: A function of the model and the batch that returns a loss as `backward` takes it: a mean, or a sum
                and its count in a tuple.
            model: The model to train; may be left out if only one has optimizers.
            max_norm: The norm to clip the model's gradients to; None clips nothing.
            last: Whether the micro-batch closes the window before it is full; see `accumulate`.

        Raises:
            AccumulationError: Several models have optimizers, and `model` is not given.
            PairingError: The model has no prepared optimizer.
        """
        trained, backward, models = self._parts.prepared.trained(model), self.backward, ()
        if model is not None:
            backward, models = partial(backward, model=model), (model,)
        with self.accumulate(*models, last=last):
            if self._parts.words is not None:
                self._parts.words.begin_backward()
            return train_step(
                trained, batch, loss=loss, max_norm=max_norm, model=model, backward=backward, note=self._note
            )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if an optimizer's last step was skipped because a gradient was not finite (fp16, or as requested)."""
        return any(
            optimizer.was_skipped for one in self._parts.prepared.models for optimizer in one.optimizers
        )

    def autocast(
        self, *, enabled: bool = True, cache_enabled: bool | None = None
    ) -> torch.autocast | NoAutocast:
        """Run the block, or the decorated function, in the run's precision, as prepared models do by themselves."""
        return autocast(self._parts.policy, self.device, enabled=enabled, cache_enabled=cache_enabled)

    def record_autocast(self, model: nn.Module | None = None) -> RecordedAutocast:
        """Run the block as `autocast` does, and record which operations run in fp32 and which in half precision.

        Args:
            model: The model in which modules are named; the forwards of all models in the block are recorded.
        """
        module = None if model is None else self.unwrap_model(model)
        return autocast(self._parts.policy, self.device, record=True, model=module)

    @needs_run
    def join_uneven_inputs(self, models: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Run the block with unprepared loaders that may end at different steps on each rank. Called on all ranks.

        Raises:
            RuntimeError: The backend does not support uneven inputs.
        """
        return self._parts.backend.join(models)

    def skip_first_batches(self, dataloader: ShardedLoader[Any], num_batches: int = 0) -> Any:
        """Return the rest of a loader's epoch, without reading the skipped batches."""
        return skip_first_batches(dataloader, num_batches)

    def end_training(self) -> None:
        """Finish saves and trackers, release the models and leave the process group. Called on all ranks.

        Methods that need the run, such as `prepare` or `log`, raise a RuntimeError afterwards.

        Raises:
            OtherRankFailedError, OSError: A background save failed.
        """
        self._end(has_failed=False)

    def _end(self, *, has_failed: bool) -> None:
        """End the run once. After an error, skip the parts that need all ranks: other ranks may not get here."""
        if self._has_ended:
            return
        parts, fp8, watch = self._parts, self._parts.fp8, self._parts.watch
        steps = [
            None if has_failed else self._save_deferred,
            self._drop_deferred,
            self._tell_unused,
            None if has_failed else self._tell_unreached,
            parts.checkpointers.close,
            self._half_check and self._half_check.finish,
            self._loss_watch and self._loss_watch.finish,
            watch and (watch.close if has_failed else watch.finish),
            fp8 and fp8.finish,
            self._tell_compiled,
            parts.trackers.finish,
            parts.backend.close,
            parts.changes.undo,
            fp8 and fp8.release,
            fp8 and fp8.close,
            parts.context.close,
        ]
        with ExitStack() as stack:  # runs every step even if one fails; what is added last runs first
            stack.callback(self._refuse_calls)
            for step in filter(None, reversed(steps)):
                stack.callback(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(has_failed=error is not None)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects, release the given ones, and return a None for each: see `release_memory`.

        Models prepared for evaluation keep the run's precision until they are prepared for training.

        Args:
            *objects: Objects to empty in place, such as the prepared model and optimizer.
        """
        self._parts.checkpointers.wait_for_copies()
        self._parts.backend.close()
        self._parts.changes.undo()
        if self._parts.fp8 is not None:
            self._parts.fp8.release()
        self._parts.prepared.clear()
        return free_memory(*objects)

    clear = free_memory
