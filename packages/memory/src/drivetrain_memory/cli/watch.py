"""Watch the memory of a process, or of a command."""

import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from drivetrain_memory.cli.watch_line import WatchLine
from drivetrain_memory.peaks.process_peak import read_high_water
from drivetrain_memory.report.page import write_page
from drivetrain_memory.report.quantities import bytes_text, seconds_text
from drivetrain_memory.tracker.rank_summary import RankSummary, merge_summaries, write_summary
from drivetrain_memory.tracker.sample_recorder import SampleRecorder, samples_file
from drivetrain_memory.usage.sampler import UsageSampler
from drivetrain_messages import argument

_USAGE, _NOT_FOUND, _NOT_EXECUTABLE, _BY_SIGNAL = 2, 127, 126, 128  # exit codes, as shells have them


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchArguments:
    """The arguments of `drivetrain memory watch`."""

    target: str = argument(
        ..., "A process id, or a command after `--`; flags stand before it.", positional=True
    )
    command: tuple[str, ...] = argument((), "The arguments of the command.", rest=True)
    interval: float = argument(0.1, "Seconds between two samples.")
    out: str = argument("memory-watch", "Folder for samples, summary and page (memory.html).")

    def __post_init__(self) -> None:
        if not 0.001 <= self.interval <= 3600:
            raise ValueError(f"--interval {self.interval}: give 0.001 to 3600 seconds")


def run(arguments: WatchArguments) -> int:
    """Watch the memory of a process, or of a command, from outside; write a summary and an HTML page.

    Return the command's exit code, or 128 plus the number of the signal that ended it; 0 for a watched process; 2 if
    there is no such process or the folder cannot be written. A later disk error ends the watch, not the program.
    """
    try:
        Path(arguments.out).mkdir(parents=True, exist_ok=True)
        samples_file(Path(arguments.out), 0).touch()
    except OSError as error:
        return _fail(f"--out {arguments.out}: cannot be written ({error}); name another folder", _USAGE)
    if arguments.target.isdecimal() and not arguments.command:
        return _watch_process(arguments, int(arguments.target))
    try:
        process = subprocess.Popen([arguments.target, *arguments.command])
    except FileNotFoundError:
        return _fail(
            f"no program {arguments.target!r}: give a process id, or a command after `--`", _NOT_FOUND
        )
    except OSError as error:
        return _fail(f"{arguments.target!r} does not start: {error}", _NOT_EXECUTABLE)
    with _forward_signals(process):
        # The program owns stdout: what is shown here goes beside it.
        try:
            watch = _Watch(arguments, process.pid, WatchLine(sys.stderr))
            while process.poll() is None and watch.look():
                time.sleep(arguments.interval)
            process.wait()
            watch.end()
        except OSError as error:  # of the disk: the program's exit code counts
            sys.stderr.write(f"drivetrain: warning: the watch ends here, the program goes on: {error}\n")
        code = process.wait()
    return code if code >= 0 else _BY_SIGNAL - code


def _watch_process(arguments: WatchArguments, pid: int) -> int:
    if not psutil.pid_exists(pid):
        return _fail(f"no process {pid}: `ps` lists those that run", _USAGE)
    watch = _Watch(arguments, pid, WatchLine(sys.stdout))
    try:
        while watch.look():
            time.sleep(arguments.interval)
    except KeyboardInterrupt:  # the end of the watch, not of the program
        pass
    watch.end()
    return 0


class _Watch:
    """A watch in progress."""

    def __init__(self, arguments: WatchArguments, pid: int, line: WatchLine) -> None:
        self._folder, self._pid, self._line = Path(arguments.out), pid, line
        self._recorder = SampleRecorder(
            UsageSampler(pid), rank=0, interval_seconds=arguments.interval, file=samples_file(self._folder, 0)
        )
        self._cpu_before = time.process_time()
        self._peak_bytes, self._source = 0, "sampled"

    def look(self) -> bool:
        """Take and show a sample; return False if the process ended."""
        # The mark is not reset: the peak since the process began is what a watch from outside should tell.
        mark = read_high_water(self._pid)
        if mark is not None:
            self._peak_bytes, self._source = max(self._peak_bytes, mark.peak_bytes), "kernel"
        try:
            if psutil.Process(self._pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.Error:
            return False
        if not self._recorder.take():
            return False
        self._line.show(self._recorder.newest, self._peak_bytes)
        return True

    def end(self) -> None:
        """Write the summary and the page, and say where they are."""
        self._recorder.close()
        summary = self._recorder.summary(
            host_peak_bytes=self._peak_bytes,
            host_source=self._source,
            device_peaks={},
            phases={},
            sampling_cpu_seconds=time.process_time() - self._cpu_before,
        )
        write_summary(self._folder, summary)
        page = write_page(
            self._folder / "memory.html", merge_summaries([summary]), title=f"Memory of process {self._pid}"
        )
        self._line.end(f"{summary_text(summary)}\n{page}")


def summary_text(summary: RankSummary) -> str:
    """Return a watch's summary as one line."""
    children = summary.peaks.get("children/resident_bytes")
    below = f", processes below it {bytes_text(children.value)}" if children and children.value else ""
    return (
        f"process {summary.pid}, {seconds_text(summary.seconds)}: peak {bytes_text(summary.host_peak_bytes)} "
        f"by the {summary.host_source}{below}; {summary.num_samples} samples"
    )


@contextmanager
def _forward_signals(process: "subprocess.Popen[bytes]") -> Generator[None]:
    """Forward SIGTERM to the program, but not Ctrl-C, which the terminal sends to the program itself."""

    def hand_on(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, hand_on)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"drivetrain: error: {message}\n")
    return code
