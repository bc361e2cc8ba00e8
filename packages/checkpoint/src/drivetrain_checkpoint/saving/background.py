"""Write saves in a thread, one at a time, while training continues."""

import logging
from collections.abc import Callable
from contextlib import closing
from threading import Thread

from torch.distributed import Store

from drivetrain_checkpoint.saving.host_buffer import HostBuffer, Overlap
from drivetrain_checkpoint.saving.store_gather import StoreGather
from drivetrain_checkpoint.saving.transaction import Save, run_save, stage_save
from drivetrain_checkpoint.storage.place import Place
from drivetrain_state import Context, control_store

logger = logging.getLogger(__name__)


class BackgroundSaves:
    """The background saves of one directory. The interpreter waits for their thread before it exits."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._buffer = HostBuffer()
        self._thread: Thread | None = None
        self._overlap: Overlap | None = None
        self._folder: Place | None = None
        self._failure: Exception | None = None

    def start(
        self,
        save: Save,
        *,
        on_commit: Callable[[Place], object],
        changes_in_step: Callable[[str], bool] | None,
    ) -> None:
        """Copy the tensors that this rank writes, and start to write them. Called on all ranks, by the main thread.

        `wait` must have been called for the last save. The thread calls `on_commit` with the committed folder. It
        copies the tensors whose paths make `changes_in_step` return True; if that is None, this call copies all.
        """
        assert self._thread is None
        staged = stage_save(self._context, save, self._buffer, changes_in_step)
        store = control_store(self._context, "drivetrain_checkpoint")
        thread = Thread(
            target=self._run, args=(staged, store, on_commit), name=f"drivetrain save of step {save.step}"
        )
        thread.start()
        # Only now, since start() may raise: nobody could wait for a thread that was not started.
        self._thread, self._overlap = thread, staged.overlap

    @property
    def is_copying(self) -> bool:
        """True if `wait_for_copies` must be called before the saved tensors may change."""
        return self._overlap is not None

    def wait_for_copies(self) -> None:
        """Wait until the saved tensors may change. The save may go on writing after that."""
        if self._overlap is not None:
            self._overlap.wait()
            self._overlap = None

    def wait(self) -> Place | None:
        """Wait for the last save; return its folder or raise its error. Further calls return None until `start`."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = self._overlap = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._folder

    def free_memory(self) -> None:
        """Free the host memory of the copies. Called while no save is being written."""
        self._buffer = HostBuffer()

    def _run(self, save: Save, store: Store | None, on_commit: Callable[[Place], object]) -> None:
        try:
            if store is None:
                run_save(self._context, save, on_block=lambda: None)
            else:
                exchange = StoreGather(
                    store,
                    save.manifest.save_id,
                    topology=self._context.topology,
                    stall_seconds=save.settings.stall_seconds,
                )
                with closing(exchange):
                    run_save(self._context, save, on_block=exchange.progress, gather=exchange.gather)
            on_commit(save.folder)
            self._folder = save.folder
        except Exception as error:  # the next wait() raises it; logged now, since wait() may never be called
            self._failure = error
            logger.exception(
                "the save of step %s failed in the background; earlier checkpoints are untouched", save.step
            )
        finally:
            if save.overlap is not None:
                save.overlap.give_up()  # a save that failed before the copies would block wait_for_copies()
