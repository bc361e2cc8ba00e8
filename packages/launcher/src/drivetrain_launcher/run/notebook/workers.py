"""Workers that stay between calls, so that a second call starts at once."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from drivetrain_launcher.run.notebook.pickled_call import pack
from drivetrain_launcher.run.notebook.rank_pool import RankPool
from drivetrain_launcher.run.notebook.rank_pool_plan import plan_rank_pool


class Workers(AbstractContextManager["Workers"]):
    """Processes that stay between the calls of a notebook.

    They start as the object is made, and import torch at once. They end with `close`, at the end of a `with` block,
    with the object, and with the notebook, even if it is killed.

    Between two calls each rank leaves its process groups, frees unused device memory, and takes over the notebook's
    environment variables, working folder and `sys.path`. If a module of yours has changed on the disk, or a call
    failed or was interrupted, fresh processes replace all of them. Otherwise a rank keeps its imports and what they
    hold.

    Args:
        num_processes: The number of processes; None for one per accelerator, or one if there is none.
        mixed_precision: The `run.mixed_precision` setting of the processes, which their code may override.
        master_port: The port of the rendezvous; 0 for any free port.
        cpu: Whether the processes train on the CPU, even if there are accelerators.

    Raises:
        LaunchError: If there are fewer accelerators than processes, or `num_processes` is not an integer of at least
            1.
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        mixed_precision: str | None = None,
        master_port: int = 0,
        cpu: bool = False,
    ) -> None:
        plan = plan_rank_pool(
            num_processes, mixed_precision=mixed_precision, master_port=master_port, cpu=cpu
        )
        self.num_processes = plan.num_processes
        self._pool = RankPool(plan)
        self._end = weakref.finalize(self, self._pool.kill)
        self._pool.start()

    def run(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        """Call `function(*args)` on every process, and return the values in rank order.

        Raises:
            LaunchError: If the function or an argument cannot be shipped; the message gives the path to the part.
            RankFailedError: If a rank fails; the message shows its traceback.
            KeyboardInterrupt: If the call is interrupted. The ranks got KeyboardInterrupt too, and 30 s to save.
            RuntimeError: If the workers are closed, or running another call.
        """
        if not self._end.alive:
            raise RuntimeError("these workers are closed; make new ones with Workers(...)")
        pickled_call = pack(function, args)
        try:
            with pickled_call.content:
                return self._pool.call(pickled_call)
        except BaseException:
            if self._end.alive:
                self._pool.start()  # ready by the time the cell is corrected
            raise

    def close(self) -> None:
        """End the processes. More calls of `close` do nothing."""
        if self._end.detach() is not None:
            self._pool.end()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._end.alive else ", closed"
        return f"Workers(num_processes={self.num_processes}{state})"
