"""The ranks of a notebook together: started, called, replaced where they cannot be used again, and ended."""

import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError, RankFailedError
from drivetrain_launcher.run.failures import describe_root, find_root
from drivetrain_launcher.run.notebook.call import Call, FailedRank, Interrupted, Interrupts, Outcome
from drivetrain_launcher.run.notebook.output import OutputView
from drivetrain_launcher.run.notebook.pickled_call import PickledCall
from drivetrain_launcher.run.notebook.rank_channel import CallSetup, Message, Returned, new_content
from drivetrain_launcher.run.notebook.rank_pool_plan import RankPoolPlan
from drivetrain_launcher.run.notebook.rank_process import RankProcess
from drivetrain_memory.usage.memory_cgroup import count_memory_kills
from drivetrain_messages import say

_GRACE_SECONDS = 30.0


class RankPool:
    """The processes of a plan."""

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
        self._memory_kills = count_memory_kills()

    def start(self) -> None:
        """Start the processes unless they run already; they import torch in the background."""
        if self._ranks:
            return
        folder = os.getcwd()
        for rank, environment in enumerate(self._plan.environments(environ.child_environment(), port=0)):
            self._ranks.append(RankProcess(rank, environment=environment, folder=folder))
        self._modules = {}

    def call(self, pickled_call: PickledCall) -> list[Any]:
        """Call a function on all ranks, and return its values in rank order.

        After a failure (RankFailedError) or an interrupt (KeyboardInterrupt) all ranks are ended. If a call of
        another thread is in progress, raise RuntimeError.
        """
        if self._is_busy:
            raise RuntimeError("these workers are running another call; wait for it, or start other workers")
        self._is_busy = True
        is_over = False
        try:
            changed: list[str] = []
            for file, time_ns in self._modules.items():
                with suppress(OSError):  # removed: the loaded code is all there is
                    if Path(file).stat().st_mtime_ns != time_ns:
                        changed.append(file)
            if changed:
                say(f"{Path(changed[0]).name} has changed since the last call; the workers start anew")
            ended = [rank for rank in self._ranks if rank.exit_code() is not None]
            if ended:
                say(
                    f"the process of rank {ended[0].rank} has ended since the last call; the workers start anew"
                )
            if changed or ended:
                self.kill()
            self.start()
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

    def _call(self, pickled_call: PickledCall) -> list[Any]:
        from drivetrain_launcher.membership.rendezvous import OneNode

        call = Call(
            self._ranks,
            OutputView(sys.stdout, sys.stderr, num_ranks=self._plan.num_processes),
            grace_seconds=_GRACE_SECONDS,
        )
        with Interrupts() as interrupts:
            # Hosted here, and new for each call: the ranks of the last one have left keys in theirs.
            meeting = OneNode("127.0.0.1", self._plan.master_port, "none").next_rendezvous()
            place = meeting.bootstrap_store_info
            assert place is not None
            try:
                environments = self._plan.environments(environ.child_environment(), port=place.master_port)
                for rank, environment in zip(self._ranks, environments, strict=True):
                    setup = CallSetup(
                        rank=rank.rank,
                        environment=environment,
                        folder=os.getcwd(),
                        search_path=tuple(sys.path),
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
                outcomes = call.watch(interrupts)
            finally:
                # An exception that somebody retains references this frame, and would retain the store.
                del meeting
        with ExitStack() as files:
            for each in outcomes:
                if isinstance(each, Returned):
                    files.enter_context(each.content)
            return self._results(outcomes)

    def _results(self, outcomes: Sequence[Outcome]) -> list[Any]:
        """Return the values of the ranks, or raise the error that ended the call."""
        failed = [each for each in outcomes if isinstance(each, FailedRank)]
        if any(isinstance(each, Interrupted) for each in outcomes):
            own = [each.failure for each in failed if each.failure.error and not each.failure.is_aftermath]
            if own:  # such as an error in saving
                sys.stderr.write(describe_root(find_root(own), num_nodes=1))
            raise KeyboardInterrupt
        if failed:
            root = find_root([each.failure for each in failed])
            exception = next(each.exception for each in failed if each.failure is root)
            try:
                error = None if exception is None else pickle.loads(exception)
            except Exception:  # noqa: BLE001 a user's class may raise anything; the error's text says enough
                error = None
            lacked_memory = count_memory_kills() != self._memory_kills
            report = describe_root(root, num_nodes=1, lacked_memory=lacked_memory)
            raise RankFailedError(report, rank=root.rank, error=error)
        values: list[Any] = []
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome, Returned)
            try:
                modules, value = outcome.read()
            except Exception as error:
                raise RankFailedError(
                    f"the return value of rank {rank} cannot be read in this process ({type(error).__name__}: "
                    f"{error}); return plain values and tensors, or import here what its class needs",
                    rank=rank,
                ) from error
            self._modules = {**self._modules, **modules}
            values.append(value)
        return values
