"""The batch size that fits in memory on all ranks, with the global batch kept by accumulation."""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from drivetrain.parts import HasParts, Parts
from drivetrain.rank_tries import RankTries
from drivetrain_memory import ExecutableBatchSize, TryOutcome, accumulation_steps, find_executable_batch_size
from drivetrain_state import broadcast_object

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class BatchSizes(HasParts):
    """The part of an Accelerator that finds a batch size.

    Attributes:
        executable_batch_size: The answer of the last search, with which the next one begins. It can be
            registered for checkpointing, too.
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
        must prepare everything anew, inside the function. The answer is kept in `project_dir`, where a run that is
        resumed finds it before it loads its state.

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

        @wraps(function)
        def with_accumulation(batch_size: int, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            self._parts.backend.window.resize(
                accumulation_steps(starting_batch_size, batch_size, steps=steps)
            )
            return function(batch_size, *args, **kwargs)

        @wraps(function)
        def search(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            self._recall()
            tries = (
                RankTries(self.context, self._release_try) if self.context.topology.world_size > 1 else None
            )
            run = find_executable_batch_size(
                with_accumulation,
                starting_batch_size=starting_batch_size,
                reduce_batch_size=reduce_batch_size,
                agree=self._alone if tries is None else tries.agree,
                remembered=self.executable_batch_size,
                limit_host=limit_host,
            )
            try:
                result = run(*args, **kwargs)
            finally:
                if tries is not None:
                    tries.close()
            self._keep()
            return result

        return search

    def _recall(self) -> None:
        """Read the answer of an earlier run from rank 0's `project_dir`. Called on all ranks."""
        file = self._answer_file()
        if self.executable_batch_size.batch_size is not None or file is None:
            return
        found = json.loads(file.read_text()) if self.context.topology.is_main and file.exists() else None
        if (state := broadcast_object(self.context, found)) is not None:
            self.executable_batch_size.load_state_dict(state)

    def _keep(self) -> None:
        """Write the answer to rank 0's `project_dir`."""
        file = self._answer_file()
        if file is not None and self.context.topology.is_main:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(self.executable_batch_size.state_dict()))

    def _answer_file(self) -> Path | None:
        project = self._parts.settings.project_dir
        return None if project is None else project / "executable_batch_size.json"

    def _alone(self, outcome: TryOutcome) -> TryOutcome:
        if outcome is TryOutcome.OUT_OF_MEMORY:
            self._release_try()
        return outcome

    def _release_try(self) -> None:
        """Forget what a failed try has prepared."""
        self._parts.backend.close()
        self._parts.prepared.clear()
