"""The batch size that fits in memory on all ranks, with the global batch kept by accumulation."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from drivetrain.accelerator.rank_tries import RankTries
from drivetrain.parts.parts import HasParts, Parts
from drivetrain_memory import ExecutableBatchSize, TryOutcome, accumulation_steps, find_executable_batch_size
from drivetrain_memory.batch_size.search import SizedFunction

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FACT = "executable batch size"  # the name under which the plan tells it


class BatchSizes(HasParts):
    """The part of an Accelerator that finds a batch size.

    Attributes:
        executable_batch_size: The batch size of the last try. The next search begins with it; without one, with the
            size that the newest checkpoint of the run was saved with.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.executable_batch_size = ExecutableBatchSize()

    def find_executable_batch_size(
        self,
        function: Callable[Concatenate[int, Arguments], Result],
        *,
        starting_batch_size: int = 128,
        reduce_batch_size: Callable[[int], int] = lambda batch_size: batch_size // 2,
        limit_host: bool = True,
    ) -> Callable[Arguments, Result]:
        """Call a function with smaller and smaller batch sizes until it fits in memory on every rank.

        Called on all ranks, and so is what it returns. Before each try the accumulation is set so that the global
        batch stays that of the starting size, rounded up to whole micro-batches. Where one rank runs out of memory,
        the try ends on all of them; what it had prepared is freed, and the process group is formed again. So a try
        must prepare everything anew, inside the function. The plan of each checkpoint holds the batch size of the
        try that saved it: a run that is started again begins with that of the newest checkpoint.

        Args:
            function: The function to call, with the samples of a micro-batch on one rank as its first argument.
            starting_batch_size: The first batch size to try.
            reduce_batch_size: A function that returns the next batch size after one that does not fit.
            limit_host: Whether host allocations beyond the limit of the job raise MemoryError in a try.

        Raises:
            ConnectError: At a call, of several ranks: the program created the process group, or `parallelism` is set.
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
        """Return a function that sets the accumulation for a batch size before it tries that."""

        @wraps(sized)
        def with_accumulation(batch_size: int, *args: Any, **kwargs: Any) -> Result:
            self._parts.backend.window.resize(steps_of(batch_size))
            self._parts.facts[_FACT] = str(batch_size)
            return sized(batch_size, *args, **kwargs)

        return with_accumulation

    def _search(
        self, tried: Callable[..., Result], find: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Result:
        """Search, with the tries of all ranks ending together. Called on all ranks."""
        self._recall()
        if self.context.topology.world_size == 1:
            return find(tried, agree=self._alone)(*args, **kwargs)
        tries = RankTries(self.context, self._release_try)
        try:
            return find(tried, agree=tries.agree)(*args, **kwargs)
        finally:
            tries.close()

    def _recall(self) -> None:
        """Take the batch size of the newest checkpoint, if there is none of a search. Called on all ranks."""
        checkpointers = self._parts.checkpointers
        if self.executable_batch_size.batch_size is not None or not checkpointers.has_default:
            return
        plan = checkpointers.of(None).latest_plan() or {}
        if (found := plan.get("facts", {}).get(_FACT)) is not None:
            self.executable_batch_size.batch_size = int(found)

    def _alone(self, outcome: TryOutcome) -> TryOutcome:
        if outcome is TryOutcome.OUT_OF_MEMORY:
            self._release_try()
        return outcome

    def _release_try(self) -> None:
        """Forget what a failed try has prepared."""
        self._parts.backend.close()
        self._parts.prepared.clear()
