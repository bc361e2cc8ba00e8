"""The ranks of a notebook together: started, called, replaced where they cannot be used again, and ended."""

import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NoReturn

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError, RankFailedError
from drivetrain_launcher.run.failures import describe_root, find_root
from drivetrain_launcher.run.notebook.call import Call, FailedRank, Interrupted, Interrupts, Outcome
from drivetrain_launcher.run.notebook.call_messages import CallSetup, Returned
from drivetrain_launcher.run.notebook.output import OutputView
from drivetrain_launcher.run.notebook.pickled_call import PickledCall
from drivetrain_launcher.run.notebook.rank_channel import Message, new_content
from drivetrain_launcher.run.notebook.rank_pool_plan import RankPoolPlan
from drivetrain_launcher.run.notebook.rank_process import RankProcess
from drivetrain_messages import say

_GRACE_SECONDS = 30.0


class RankPool:
    """The processes of a plan.

    Args:
        plan: The plan of the processes.
    """

    def __init__(self, plan: RankPoolPlan) -> None:
        if sys.platform == "win32":
            raise LaunchError(
                "functions are launched over Unix sockets and signals, which Windows does not have; drivetrain "
                "launch SCRIPT runs a script in one process there"
            )
        self._plan = plan
        self._owner = os.getpid()
        self._ranks: list[RankProcess] = []
        self._modules: Mapping[str, int] = {}
        self._is_busy = False

    def start(self) -> None:
        """Start the processes, which import torch meanwhile, unless they run."""
        if self._ranks:
            return
        folder = os.getcwd()
        for rank, environment in enumerate(self._plan.environments(environ.child_environment(), port=0)):
            self._ranks.append(RankProcess(rank, environment=environment, folder=folder))
        self._modules = {}

    def call(self, pickled_call: PickledCall) -> list[Any]:
        """Call a function on all ranks.

        After a failure or an interrupt no rank is left.

        Returns:
            The return values, in rank order.

        Raises:
            RankFailedError: If a rank fails.
            KeyboardInterrupt: If the notebook is interrupted; the ranks have stopped.
            RuntimeError: If a call is in progress, in another thread.
        """
        if self._is_busy:
            raise RuntimeError("these workers are running another call; wait for it, or start other workers")
        self._is_busy = True
        is_over = False
        try:
            self._replace_stale()
            for note in pickled_call.notes:
                say(note)
            results = self._call(pickled_call)
            is_over = True
            return results
        finally:
            self._is_busy = False
            if not is_over:
                self.kill()

    def end(self) -> None:
        """Let the processes end by themselves, and show what they still write; kill them after 30 s."""
        with Interrupts() as interrupts:
            output = OutputView(sys.stdout, sys.stderr, num_ranks=self._plan.num_processes)
            for rank in self._ranks:
                rank.ask_to_end()
            deadline = time.monotonic() + _GRACE_SECONDS
            while not interrupts.count and time.monotonic() < deadline:
                has_ended = all(rank.exit_code() is not None for rank in self._ranks)
                for rank in self._ranks:
                    for name in ("stdout", "stderr"):
                        while data := rank.read(name):
                            output.feed(name, rank.rank, data)
                if has_ended:
                    break
                time.sleep(0.01)
            output.finish()
            self.kill()

    def kill(self) -> None:
        """Kill the processes and their children. In a process forked from the notebook, this does nothing."""
        if os.getpid() == self._owner:
            for rank in self._ranks:
                rank.close()
            self._ranks = []

    def _replace_stale(self) -> None:
        """Start the processes anew if one has ended, or if a module of the user's has changed on the disk."""
        changed = [file for file, time_ns in self._modules.items() if _changed(file, time_ns)]
        if changed:
            say(f"{Path(changed[0]).name} has changed since the last call; the workers start anew")
        ended = [rank for rank in self._ranks if rank.exit_code() is not None]
        if ended:
            say(f"the process of rank {ended[0].rank} has ended since the last call; the workers start anew")
        if changed or ended:
            self.kill()
        self.start()

    def _call(self, pickled_call: PickledCall) -> list[Any]:
        from drivetrain_launcher.membership.rendezvous import OneNode

        call = Call(
            self._ranks,
            OutputView(sys.stdout, sys.stderr, num_ranks=self._plan.num_processes),
            show_figure=_show_png,
            grace_seconds=_GRACE_SECONDS,
        )
        with Interrupts() as interrupts:
            # Hosted here, and new for each call: the ranks of the last one have left keys in theirs.
            meeting = OneNode("127.0.0.1", self._plan.master_port, "none").next_rendezvous()
            place = meeting.bootstrap_store_info
            assert place is not None
            try:
                self._send(pickled_call, port=place.master_port)
                outcomes = call.watch(interrupts)
            finally:
                del meeting  # a kept exception references this frame, and would keep the store
        return self._results(outcomes)

    def _send(self, pickled_call: PickledCall, *, port: int) -> None:
        folder = os.getcwd()
        environments = self._plan.environments(environ.child_environment(), port=port)
        for rank, environment in zip(self._ranks, environments, strict=True):
            setup = CallSetup(
                rank=rank.rank, environment=environment, folder=folder, search_path=tuple(sys.path)
            )
            try:
                with new_content() as content:
                    pickle.dump(setup, content)
                    rank.channel.send(Message.SETUP, content)
                rank.channel.send(Message.CALL, pickled_call.content)
            except OSError:
                if rank.exit_code() is None:
                    raise
                # It has ended: `Call.watch` sees that, and says how.

    def _results(self, outcomes: Sequence[Outcome]) -> list[Any]:
        """Return the values of the ranks, or raise what ended the call."""
        failed = [each for each in outcomes if isinstance(each, FailedRank)]
        with ExitStack() as files:
            for each in outcomes:
                if isinstance(each, Returned):
                    files.enter_context(each.content)
            return self._values(outcomes, failed)

    def _values(self, outcomes: Sequence[Outcome], failed: Sequence[FailedRank]) -> list[Any]:
        if any(isinstance(each, Interrupted) for each in outcomes):
            own = [each for each in failed if each.failure.error and not each.failure.is_aftermath]
            if own:  # such as an error in saving
                sys.stderr.write(describe_root(find_root([each.failure for each in own]), num_nodes=1))
            raise KeyboardInterrupt
        if failed:
            _raise_root(failed)
        values: list[Any] = []
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome, Returned)
            values.append(self._value_of(rank, outcome))
        return values

    def _value_of(self, rank: int, returned: Returned) -> Any:
        try:
            modules, value = returned.read()
        except Exception as error:
            raise RankFailedError(
                f"the return value of rank {rank} cannot be read in this process ({type(error).__name__}: {error}); "
                "return plain values and tensors, or import here what its class needs",
                rank=rank,
            ) from error
        self._modules = {**self._modules, **modules}
        return value


def _show_png(content: IO[bytes]) -> None:
    """Show a figure in the cell that runs."""
    from IPython.display import Image, display

    content.seek(0)
    display(Image(data=content.read(), format="png"))


def _raise_root(failed: Sequence[FailedRank]) -> NoReturn:
    root = find_root([each.failure for each in failed])
    pickled = next(each.exception for each in failed if each.failure.rank == root.rank)
    text = describe_root(root, num_nodes=1)
    raise RankFailedError(text, rank=root.rank, error=_unpickled(pickled))


def _unpickled(exception: bytes | None) -> BaseException | None:
    """Return an exception of a rank; None if its class cannot be read here, as its text says enough."""
    try:
        error = pickle.loads(exception) if exception is not None else None
    except Exception:  # noqa: BLE001 - a constructor may raise anything
        return None
    return error if isinstance(error, BaseException) else None


def _changed(file: str, time_ns: int) -> bool:
    try:
        return Path(file).stat().st_mtime_ns != time_ns
    except OSError:
        return False  # removed: the loaded code is all there is
