"""Run an elastic plan with torch's agent, and report a failure once all ranks have stopped.

This module is imported only to start processes under the agent, since it imports what torchrun imports of torch.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from threading import current_thread, main_thread
from types import FrameType
from typing import IO, Any, cast

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from drivetrain_clusters.protocol import RESUME_EXIT_CODE
from drivetrain_config import environ
from drivetrain_launcher.compat import (
    HAS_SHUTDOWN_TIMEOUT,
    exit_codes,
    forgo_restarts,
    poll_exit_codes,
    ranks_started_by,
    remaining_restarts,
    silence_torch,
)
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.membership.handler import ElasticNodes
from drivetrain_launcher.membership.member import RoundOverError, RunOverError
from drivetrain_launcher.membership.rendezvous import rendezvous_of
from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_launcher.run.failures import (
    RankFailure,
    announce,
    describe_others,
    describe_root,
    describe_tail,
    find_root,
    read_failure,
    read_process_failure,
)
from drivetrain_launcher.run.keeper.keeper import Keeper
from drivetrain_launcher.run.keeper.keeper_messages import KeeperOptions
from drivetrain_launcher.run.keeper.rank_streams import RankStreams
from drivetrain_launcher.run.keeper.sessions import kill_sessions
from drivetrain_launcher.run.node_changes import NodeChanges
from drivetrain_launcher.run.output.terminals import are_one_output, output_terminals
from drivetrain_launcher.run.preload.preloader import ForkedRank, Preloader
from drivetrain_launcher.run.stopped_ranks import StoppedRanks
from drivetrain_memory.usage.memory_cgroup import count_memory_kills
from drivetrain_messages import say
from drivetrain_state.hang.report import HANG_NOTE

_SAVED = f"all ranks have saved; run the same command again to continue (exit code {RESUME_EXIT_CODE})"
# A wrapper such as `uv run` forwards the signal that the terminal, or a supervisor, also sends to the launcher.
_ONE_PRESS_SECONDS = 1.0


def run_elastic(plan: LaunchPlan, preloader: Preloader | None = None) -> int:
    """Start the processes of a plan on this node, as forks of the given preloader if any, and wait for them.

    The environment of this process already has the variables of the plan.

    Returns:
        0 if all ranks succeeded; else the exit code of the rank that failed first, or 128 + the signal's number.

    Raises:
        LaunchError: If the rendezvous fails: the port is in use, the master cannot be reached, a node is missing.
    """
    options = KeeperOptions(
        launcher=os.getpid(),
        grace_seconds=plan.shutdown_timeout_seconds,
        are_same=are_one_output(),
        terminals=output_terminals(environ.child_environment()),
    )
    try:
        with (
            TemporaryDirectory(prefix="drivetrain_") as scratch,
            silence_torch(),
            Keeper(options) as keeper,
            RankStreams(plan, keeper) as streams,
        ):
            handler = rendezvous_of(plan)
            changes = NodeChanges(handler, plan) if isinstance(handler, ElasticNodes) else None
            stopped = StoppedRanks(
                keeper.say, limit_seconds=plan.standstill_seconds, may_pause=plan.num_nodes == 1
            )
            logs = WorkerLogs(plan, Path(scratch), streams)
            starter = RankStarter(plan, preloader, keeper)
            agent = Agent(
                plan, handler, changes=changes, stopped=stopped, logs=logs, starter=starter, keeper=keeper
            )
            return _run_agent(agent, keeper)
    except SignalException as stop:  # while no rank ran
        return _say_stopped(stop)
    except (DistNetworkError, DistStoreError, RendezvousError) as error:
        raise LaunchError(_explain_no_meeting(plan, error)) from error


def _run_agent(agent: "Agent", keeper: Keeper) -> int:
    result = None
    try:
        result = cast("RunResult | None", agent.run())
    except (SignalException, RunOverError) as stop:
        if isinstance(stop, RunOverError):
            say(str(stop))
        if agent.has_saved:
            keeper.drain()
            say(_SAVED)
            return RESUME_EXIT_CODE
        if isinstance(stop, SignalException):
            keeper.drain()
            return _say_stopped(stop, hang=agent.hang)
        return stop.exit_code
    finally:
        handler = agent.get_worker_group().spec.rdzv_handler
        if isinstance(handler, ElasticNodes):
            code = agent.exit_code or int(sys.exception() is not None)
            handler.leave("failed" if code else "finished", exit_code=code)
        handler.shutdown()
    if agent.exit_code == 0 and result is not None and result.state is not WorkerState.SUCCEEDED:
        say(f"torch's agent gave up on the ranks, which are {result.state.name.lower()}")
        return 1
    return agent.exit_code


def _say_stopped(stop: SignalException, *, hang: str = "") -> int:
    """Name the signal, and a hang that lasted until then; return the exit code for the shell."""
    say(f"stopped by {stop.sigval.name}; no rank is left")
    if hang:
        say(f"the hang before it: {hang}")
    return 128 + stop.sigval


class WorkerLogs(DefaultLogsSpecs):
    """The error files of the ranks and their outputs, as torch's agent asks for them."""

    def __init__(self, plan: LaunchPlan, scratch: Path, streams: RankStreams) -> None:
        super().__init__(
            log_dir=str(plan.log_dir or scratch), redirects=Std.ALL if plan.log_dir is not None else Std.NONE
        )
        self.error_files: dict[int, Path] = {}
        self._streams = streams

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Assign the files of all ranks; the agent calls this each time it starts the ranks."""
        destinations = super().reify(envs)
        self.error_files = {rank: Path(file) for rank, file in destinations.error_files.items()}
        self._streams.begin_attempt(f"TORCHELASTIC_ERROR_FILE={self.error_files[0].parents[1]}")
        for local_rank, variables in envs.items():
            files = {1: destinations.stdouts[local_rank], 2: destinations.stderrs[local_rank]}
            opened = self._streams.open(int(variables["RANK"]), files)
            destinations.stdouts[local_rank], destinations.stderrs[local_rank] = opened
        return destinations

    def read_hang_note(self) -> str:
        """Return the watchdog's report on a hang that lasted to the end; empty if no rank of this node has one."""
        notes = [file.with_name(HANG_NOTE) for file in self.error_files.values()]
        return next((note.read_text() for note in notes if note.exists()), "")


class RankStarter:
    """A starter of ranks on their cores, as new processes or forks of a preloader; `pids` are their process ids."""

    def __init__(self, plan: LaunchPlan, preloader: Preloader | None, keeper: Keeper) -> None:
        self.pids: list[int] = []
        self._plan = plan
        self._preloader = preloader
        self._keeper = keeper

    def start(
        self,
        local_rank: int,
        environment: Mapping[str, str],
        outputs: Sequence[IO[Any] | None],
        start_fresh: Callable[[], "Popen[Any]"],
    ) -> "Popen[Any] | ForkedRank":
        """Start a rank; see `compat.StartRank`."""
        cpus = self._plan.bindings[local_rank].cpus if self._plan.bindings else ()
        if self._preloader is not None:
            rank = self._preloader.start_rank(environment, cpus=cpus, outputs=outputs)
            self.pids.append(rank.pid)
            # The keeper finds fresh ranks by their first environment; that of a forked one is its parent's.
            self._keeper.set_ranks(self.pids)
            return rank
        before = os.sched_getaffinity(0) if cpus else ()
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)  # the rank inherits them
            rank = start_fresh()
        finally:
            if cpus:
                os.sched_setaffinity(0, before)
        self.pids.append(rank.pid)
        return rank


class StopSignals:
    """A signal handler that raises `SignalException` as torch's does, but only once for signals within one second."""

    def __init__(self) -> None:
        self._raised_at = -_ONE_PRESS_SECONDS

    def take_over(self, pids: Collection[int]) -> None:
        """Replace the handlers of torch's agent, and forward SIGUSR1 and SIGUSR2 to the running ranks.

        Batch systems request a save with these two. Outside the main thread, this does nothing: only the main
        thread can handle signals.
        """
        if current_thread() is not main_thread():
            return

        def forward(number: int, frame: FrameType | None) -> None:
            del frame
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        def stop(number: int, frame: FrameType | None) -> None:
            del frame
            now = time.monotonic()
            if now - self._raised_at >= _ONE_PRESS_SECONDS:
                self._raised_at = now
                caught = signal.Signals(number)
                raise SignalException(f"stopped by {caught.name}", sigval=caught)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            handler = signal.getsignal(number)
            if getattr(handler, "__module__", "").startswith("torch.distributed.elastic"):
                signal.signal(number, stop)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, forward)


class Agent(LocalElasticAgent):
    """An extension of torch's agent that reports failures and stops.

    A line names the failed rank at once: the other ranks may be saving, and take long to stop. The traceback comes
    last, below their output.

    Attributes:
        exit_code: The exit code for the shell.
        hang: The watchdog's report on a hang that lasted until a signal stopped the run; empty if there was none.
        has_saved: Whether a stopped rank ended with the exit code for "all ranks have saved, restart them".
    """

    def __init__(
        self,
        plan: LaunchPlan,
        handler: RendezvousHandler,
        *,
        changes: NodeChanges | None,
        stopped: StoppedRanks,
        logs: WorkerLogs,
        starter: RankStarter,
        keeper: Keeper,
    ) -> None:
        program, *arguments = plan.command
        spec = WorkerSpec(
            role="default",
            local_world_size=plan.processes_per_node,
            rdzv_handler=handler,
            entrypoint=program,
            # The agent substitutes $-macros in arguments; escape them, to pass the script's arguments unchanged.
            args=tuple(argument.replace("$", "$$") for argument in arguments),
            max_restarts=plan.max_restarts,
            monitor_interval=plan.monitor_interval_seconds,
            master_addr=plan.master_addr if plan.is_static_meeting else None,
            master_port=plan.master_port if plan.is_static_meeting else None,
        )
        super().__init__(spec, logs_specs=logs)
        self.exit_code = 0
        self.hang = ""
        self.has_saved = False
        self._logs = logs
        self._plan = plan
        self._keeper = keeper
        self._starter = starter
        self._root: RankFailure | None = None
        self._memory_kills = count_memory_kills()
        self._has_told = False
        self._signals = StopSignals()
        self._changes = changes
        self._stopped = stopped

    # The methods of compat.OVERRIDDEN. torch decorates all but `_shutdown` with a timer, whose type hides signatures.
    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        rendezvous = cast("Callable[[WorkerGroup], None]", super()._rendezvous)
        while True:
            try:
                return rendezvous(worker_group)
            except RoundOverError:  # the nodes changed before all of them had started their ranks
                continue

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._root, self._has_told = None, False
        start = cast("Callable[[WorkerGroup], dict[int, int]]", super()._start_workers)
        self._starter.pids.clear()
        try:
            with ranks_started_by(self._starter.start):
                pids = start(worker_group)
        except BaseException:  # torch knows none of them yet
            kill_sessions(self._starter.pids)
            raise
        self._keeper.set_ranks(list(pids.values()))
        # torch installs its own signal handlers when it starts processes, so replace them afterwards.
        self._signals.take_over(pids.values())
        if self._changes is not None:
            self._changes.started(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._changes is not None:
            self._changes.nodes.check()
        self._keeper.ensure_running()
        if not self._has_told:
            self._stopped.look(_ranks_of(worker_group))
            codes = poll_exit_codes(self)
            failures = self._failures(worker_group, codes)
            # A broken connection is only a consequence of another failure.
            causes = [failure for failure in failures if failure.error and not failure.is_aftermath]
            if causes:
                self._root = find_root(causes)
            has_ended = any(code not in (0, RESUME_EXIT_CODE) for code in codes.values())
            if failures and (causes or has_ended) and self._plan.world_size > 1:
                self._has_told = True
                seconds = self._plan.shutdown_timeout_seconds
                self._keeper.say(announce(self._root or find_root(failures), seconds=seconds))
        if self._has_told:  # torch now gives the others time to end, which those that stand still do not take
            self._stopped.release(_ranks_of(worker_group), may_save=False)
        monitor = cast("Callable[[WorkerGroup], RunResult]", super()._monitor_workers)
        result = monitor(worker_group)
        failures = [read_process_failure(rank, failure) for rank, failure in result.failures.items()]
        if self._changes is not None:
            if result.state is WorkerState.SUCCEEDED:
                self._changes.nodes.finished()
            if result.is_failed() and self._changes.caused(failures):
                return RunResult(state=WorkerState.HEALTHY)  # it costs no restart
        if result.is_failed():
            self._show_all(failures, worker_group)
        return result

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: float = 0,  # noqa: ARG002 - the agent's timeout; the plan's applies
    ) -> None:
        """Stop the ranks; a second signal during this time kills them."""
        seconds = self._plan.shutdown_timeout_seconds
        if self._changes is not None:
            seconds = self._changes.stop_seconds()
        is_by_signal = isinstance(sys.exception(), SignalException)
        self._stopped.release(_ranks_of(self.get_worker_group()), may_save=is_by_signal)
        if is_by_signal:
            self.hang = (
                self._logs.read_hang_note()
            )  # a later one would accuse ranks that the signal has ended
            self._keeper.say(
                f"{death_sig.name}: stopping {self._plan.processes_per_node} ranks, which have {seconds:g} s to "
                "save; once more kills them"
            )
            if self._changes is not None:
                self._changes.nodes.leave("stopped")  # before its ranks are stopped
        elif self._changes is not None:
            self._changes.say_why_restart()
        try:
            self._stop(death_sig, seconds)
        except SignalException:
            self._keeper.say("killing the ranks: what they were saving is left uncommitted")
            self._stop(signal.SIGKILL, seconds)
        self.has_saved = RESUME_EXIT_CODE in exit_codes(self)
        if (worker_group := self.get_worker_group()).state is not WorkerState.SUCCEEDED:
            # What failed or stopped ranks have started, such as loader workers; each rank leads a session.
            kill_sessions(_ranks_of(worker_group))

    def _stop(self, death_sig: signal.Signals, seconds: float) -> None:
        if HAS_SHUTDOWN_TIMEOUT:
            super()._shutdown(death_sig, max(1, round(seconds)))
        else:
            super()._shutdown(death_sig)

    def _failures(self, worker_group: WorkerGroup, codes: Mapping[int, int]) -> list[RankFailure]:
        """Return the failures so far, from recorded exceptions and from `codes`, the exit codes by local rank."""
        found: list[RankFailure] = []
        for worker in worker_group.workers:
            record: dict[str, object] = {}
            file = self._logs.error_files.get(worker.local_rank)
            # torch's own `record` may still be writing it.
            with suppress(FileNotFoundError, json.JSONDecodeError):
                record = json.loads(file.read_text()) if file is not None else {}
            code = codes.get(worker.local_rank)
            if record or code not in (None, 0, RESUME_EXIT_CODE):
                failure = read_failure(
                    record,
                    rank=worker.global_rank,
                    local_rank=worker.local_rank,
                    pid=cast("int", worker.id),
                    exit_code=code,
                    seen=time.time(),
                )
                found.append(failure)
        return found

    def _show_all(self, failures: list[RankFailure], worker_group: WorkerGroup) -> None:
        kill_sessions(_ranks_of(worker_group))  # what they have started may still write
        self._keeper.drain()
        # One rank suffices: it uses this code only when all have saved. Others may have been stopped while ending.
        if any(failure.exit_code == RESUME_EXIT_CODE for failure in failures):
            say(_SAVED)
            self.exit_code = RESUME_EXIT_CODE
            forgo_restarts(self)
            return
        # torch 2.9 omits ranks that failed while they were being stopped.
        known = {failure.rank for failure in failures}
        failures += [each for each in self._failures(worker_group, {}) if each.rank not in known]
        failures = [self._stopped.explain(failure) for failure in failures]
        told = [each for each in failures if self._root is not None and each.rank == self._root.rank]
        self._root = root = find_root(told or failures)
        lines = self._keeper.last_lines(root.rank, self._plan.tail_of(root.rank))
        sys.stderr.write(describe_others(root, failures))
        sys.stderr.write(describe_tail(root, lines))
        codes = poll_exit_codes(self)
        report = describe_root(
            root,
            num_nodes=self._plan.num_nodes,
            ended=[each.global_rank for each in worker_group.workers if codes.get(each.local_rank) == 0],
            hang=self._logs.read_hang_note(),
            folder=self._logs.error_files[root.local_rank].parent if self._plan.log_dir is not None else None,
            lacked_memory=count_memory_kills() != self._memory_kills,
        )
        sys.stderr.write(report)
        self.exit_code = root.shell_code
        if (remaining := remaining_restarts(self)) > 0:
            attempt = self._plan.max_restarts - remaining + 1
            say(f"restarting all ranks ({attempt} of {self._plan.max_restarts})")
            self.exit_code = 0


def _ranks_of(worker_group: WorkerGroup) -> dict[int, int]:
    """Return the ranks of the started processes, by process id."""
    started = [worker for worker in worker_group.workers if worker.id is not None]
    return {cast("int", worker.id): worker.global_rank for worker in started}


def _explain_no_meeting(plan: LaunchPlan, error: Exception) -> str:
    where = f"{plan.master_addr}:{plan.master_port}"
    if "EADDRINUSE" in str(error) or "already in use" in str(error):
        free = "leave it out for any free one" if plan.num_nodes == 1 else "say another on every node"
        port = f"--master-port {plan.master_port}"
        if plan.placement is not None and plan.master_port == plan.placement.master_port:
            port += f", which follows from {plan.placement.source('master_port')}"
        return f"{port}: the port is in use on this machine, most likely by another run; {free}"
    if plan.num_nodes == 1:
        return (
            f"--master-addr {plan.master_addr}: this machine cannot meet itself there ({error}); leave it out"
        )
    return (
        f"the {plan.num_nodes} nodes did not meet at {where} within {plan.rdzv_timeout_seconds:g} s, or lost each "
        "other: check that drivetrain launch runs on every node with the same --num-nodes, --master-addr and "
        f"--master-port, that the address is that of node 0, and that the port is reachable ({error})"
    )
