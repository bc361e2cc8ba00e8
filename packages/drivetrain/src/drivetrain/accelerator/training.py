"""Lengths of schedules, clipping, manual gradients, the loss scale and the batch size that fits."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from math import ceil
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch import Tensor, nn

from drivetrain.parts.parts import HasParts, Parts, needs_run
from drivetrain.prepare.prepare import prepare_objects
from drivetrain.prepare.schedule_length import steps_of, tell_unreached
from drivetrain_backends import (
    AccumulationWindow,
    BackwardOptions,
    PairingError,
    Prepared,
    SupportsManualSteps,
)
from drivetrain_backends.modules.autocast_forward import prepare_forward
from drivetrain_data import ShardedLoader
from drivetrain_data.settings import UnevenPolicy
from drivetrain_memory import ExecutableBatchSize, TryOutcome, accumulation_steps, find_executable_batch_size
from drivetrain_memory.batch_size.search import SizedFunction

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FACT = "executable batch size"  # the name under which the plan tells it

logger = logging.getLogger(__name__)


class Training(HasParts):
    """The part of an Accelerator for lengths of schedules, clipping, manual gradients and the batch size that fits.

    Attributes:
        executable_batch_size: The batch size of the last try. The next search begins with this size. The first search
            begins with the size stored in the run's newest checkpoint, if any.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.executable_batch_size = ExecutableBatchSize()

    @property
    def window(self) -> AccumulationWindow:
        """The accumulation window, for programs that decide themselves which micro-batch closes it."""
        return self._parts.backend.window

    def prepared_of(self, model: nn.Module) -> Prepared:
        """Return a model as the backend prepared it, for programs that write files in their own layout.

        Raises:
            ValueError: The model was not prepared by this Accelerator.
        """
        return self._parts.prepared.of(model)

    def has_prepared(self, model: nn.Module) -> bool:
        """Return whether a model is prepared, and neither `free_memory` nor `end_training` has forgotten it."""
        return self._parts.prepared.find(model) is not None

    def loss_scale_state(self) -> Mapping[str, Any] | None:
        """Return the state of the loss scale, to save it elsewhere; None if the run does not scale its loss."""
        return self._parts.backend.state_dict()["scaler"]

    def load_loss_scale_state(self, state: Mapping[str, Any]) -> None:
        """Load a result of `loss_scale_state`. Called on all ranks.

        Raises:
            ValueError: The run does not scale its loss, or the scale is out of range.
        """
        backend = self._parts.backend
        backend.load_state_dict({**backend.state_dict(), "scaler": state})

    def _tell_compiled(self) -> None:
        """Print what was compiled, and what it took, if the run prints its plan."""
        settings = self._parts.settings
        is_shown = self.context.topology.is_main and (settings.show_plan or settings.verbose)
        if is_shown and (said := self._parts.changes.compiled()) is not None:
            sys.stderr.write(f"compiled {said}\n")

    def _tell_unreached(self) -> None:
        """Warn of schedules that training did not complete."""
        if self.context.topology.is_main:
            tell_unreached(self._parts.prepared.schedulers)

    def num_steps(
        self, loader: ShardedLoader[Any], *, epochs: float | None = None, samples: int | None = None
    ) -> int:
        """Return the number of optimizer steps in training, for a schedule; the same on all ranks.

        Args:
            loader: A prepared loader; an epoch's last batch closes its window.
            epochs: The number of epochs to train; a fraction of an epoch counts by its batches.
            samples: The number of samples to train on, over all ranks, instead of `epochs`.

        Raises:
            TypeError: The loader is not prepared, or not exactly one of `epochs` and `samples` is given.
            ValueError: The loader's length is unknown, or the number is not above 0.
        """
        if not isinstance(loader, ShardedLoader):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
            raise TypeError(
                f"num_steps({type(loader).__name__}): pass the loader that prepare() returned; before prepare(), the "
                "batches of all ranks are counted, and an epoch has fewer steps on more ranks"
            )
        if (epochs is None) == (samples is None):
            raise TypeError(f"num_steps(epochs={epochs!r}, samples={samples!r}): give one of the two")
        amount = cast("float", samples if epochs is None else epochs)
        if not amount > 0:
            raise ValueError(f"num_steps(epochs={epochs!r}, samples={samples!r}): must be above 0")
        accumulation = self._parts.backend.window.next_num_micro_batches
        try:
            num_batches, num_samples = len(loader), len(loader.dataset)
        except TypeError as error:
            raise ValueError(
                "num_steps(): the length of this loader is not known; write the schedule in optimizer steps"
            ) from error
        if epochs is not None:
            steps = steps_of(epochs, num_batches, accumulation)
        else:
            whole, rest = divmod(cast("int", samples), num_samples)
            per_batch = loader.total_batch_size or num_samples / num_batches
            batches = min(num_batches, ceil(rest / per_batch))
            steps = steps_of(whole, num_batches, accumulation) + ceil(batches / accumulation)
        self._parts.prepared.counted_steps.add(steps)
        return steps

    @needs_run
    def prepare_evaluation(self, model: nn.Module) -> nn.Module:
        """Move a model for evaluation to the device, and make it compute in the run's precision, in place.

        To train the model later, pass it to `prepare`.

        Args:
            model: The model, such as the reference of a preference loss. Nothing wraps, shards or saves it.
        """
        parts = self._parts
        parts.prepared.restore_evaluated([model])
        model.to(parts.context.device)
        prepare_forward(model, parts.policy, parts.context.device)
        parts.prepared.evaluated.add(model)
        return model

    @needs_run
    def prepare_loader(self, loader: Any, *, even: UnevenPolicy) -> ShardedLoader[Any]:
        """Prepare one loader whose tail is treated by `even` instead of `data.even`. Called on all ranks."""
        prepare_objects([loader], self._parts, even=even)
        return self._parts.prepared.loaders[-1]

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the gradients' global norm once the window is closed. Called on all ranks.

        Returns:
            The norm before clipping, shape (); None while the window is open.
        """
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return self._parts.prepared.holding(chosen).clip(chosen, norm=max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each gradient element to [-clip_value, clip_value] once the window is closed. Called on all ranks."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._parts.prepared.holding(chosen).clip(chosen, value=clip_value)

    @needs_run
    def backward_alone(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Add the gradients of a loss to `.grad`, averaged over ranks, for a program with its own optimizer.

        In `no_sync()` and in an open window the gradients stay local. No window counts the loss. Called on all ranks.

        Args:
            loss: A loss of shape (), of a prepared model without a prepared optimizer.
            retain_graph: Whether the graph is kept for another backward.
            create_graph: Whether the gradients have a graph of their own; not under DDP.
            inputs: The leaves that get gradients; None for all.

        Raises:
            PairingError: The backend divides gradients or scales losses, or the loss trains no prepared model.
            AccumulationError: No model is prepared, or an argument cannot be honoured.
        """
        backend = self._parts.backend
        if not isinstance(backend, SupportsManualSteps):
            raise PairingError(
                f"backward() without a prepared optimizer under {type(backend).__name__}: an unprepared optimizer "
                "knows nothing of shards and windows. Pass it to prepare() with its model"
            )
        options = BackwardOptions(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
        backend.backward_alone(loss, options=options)

    @needs_run
    def find_executable_batch_size(
        self,
        function: Callable[Concatenate[int, Arguments], Result],
        *,
        starting_batch_size: int = 128,
        reduce_batch_size: Callable[[int], int] = lambda batch_size: batch_size // 2,
        limit_host: bool = True,
    ) -> Callable[Arguments, Result]:
        """Call a function with smaller and smaller batch sizes until it fits in memory on every rank.

        Called on all ranks, and so is the function that it returns. Before each try the accumulation is set so
        that the global batch stays that of the starting size, rounded up to whole micro-batches. If one rank runs out
        of memory, the try ends on all ranks, its prepared objects are freed, and the process group is formed again.
        So `function` must prepare everything it uses. A checkpoint's plan holds the batch size of the try that saved
        it. A restarted run begins with the batch size of the newest checkpoint.

        Args:
            function: The function to call, with the samples of a micro-batch on one rank as its first argument.
            starting_batch_size: The first batch size to try.
            reduce_batch_size: A function from a batch size that does not fit to the next one.
            limit_host: Whether host allocations beyond the limit of the job raise MemoryError in a try.

        Raises:
            ConnectError: At a call on several ranks: the program created the process group, or `parallelism` is set.
            NoBatchSizeFitsError: At a call, every batch size ran out of memory.
            OtherRankFailedError: At a call, the function failed on another rank.
        """
        steps = self._parts.backend.window.next_num_micro_batches
        find = partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size=reduce_batch_size,
            limit_host=limit_host,
            remembered=self.executable_batch_size,
        )
        steps_of = partial(accumulation_steps, starting_batch_size, steps=steps)
        return SizedFunction(function, lambda sized: partial(self._search, self._try(sized, steps_of), find))

    def _try(self, sized: Callable[..., Result], steps_of: Callable[[int], int]) -> Callable[..., Result]:
        """Return a function that sets the accumulation for the batch size before each try."""

        @wraps(sized)
        def with_accumulation(batch_size: int, *args: Any, **kwargs: Any) -> Result:
            self._parts.backend.window.resize(steps_of(batch_size))
            self._parts.facts[_FACT] = str(batch_size)
            return sized(batch_size, *args, **kwargs)

        return with_accumulation

    def _search(
        self, tried: Callable[..., Result], find: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Result:
        """Search for a batch size; each try ends on all ranks together. Called on all ranks."""
        checkpointers, size = self._parts.checkpointers, self.executable_batch_size
        if size.batch_size is None and checkpointers.has_default:  # begin with that of the newest checkpoint
            facts = (checkpointers.of(None).latest_plan() or {}).get("facts", {})
            size.batch_size = int(facts[_FACT]) if _FACT in facts else None
        if self.context.topology.world_size == 1:
            return find(tried, agree=self._agree_alone)(*args, **kwargs)
        from drivetrain.accelerator.rank_tries import RankTries

        tries = RankTries(self.context, self._release_try)
        try:
            return find(tried, agree=tries.agree)(*args, **kwargs)
        finally:
            tries.close()

    def _agree_alone(self, outcome: TryOutcome) -> TryOutcome:
        if outcome is TryOutcome.OUT_OF_MEMORY:
            self._release_try()
        return outcome

    def _release_try(self) -> None:
        """Forget the objects that a failed try has prepared."""
        self._parts.backend.close()
        self._parts.changes.undo()
        self._parts.prepared.clear()
