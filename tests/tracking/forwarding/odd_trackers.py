"""Trackers of platforms that behave badly, by module:Class, for writer processes."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path


class FileTracker:
    """Writes a line for each call to `DIRECTORY/NAME.txt`."""

    on_all_ranks = False
    name = "file"

    def __init__(self, directory: Path) -> None:
        self.path = Path(directory) / f"{self.name}.txt"

    def start(self, run_name: str, config: Mapping[str, object], *, tag: str = "") -> None:
        self._write(f"start {run_name} {tag}".strip())

    def log(self, values: Mapping[str, object], *, step: int | None = None) -> None:
        self._write(str(step))

    def finish(self) -> None:
        self._write("finish")

    def _write(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line + "\n")


class SlowTracker(FileTracker):
    name = "slow"

    def log(self, values: Mapping[str, object], *, step: int | None = None) -> None:
        time.sleep(60)


class RaisingTracker(FileTracker):
    name = "raising"

    def log(self, values: Mapping[str, object], *, step: int | None = None) -> None:
        raise OSError("503: down for maintenance")


class CrashingTracker(FileTracker):
    """Crashes as a C extension would, at every third step, and takes the step when its process was started again."""

    name = "crashing"

    def log(self, values: Mapping[str, object], *, step: int | None = None) -> None:
        crashed = self.path.with_suffix(f".{step}")
        if step is not None and step % 3 == 0 and not crashed.exists():
            crashed.touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        super().log(values, step=step)


class JoiningTracker(FileTracker):
    """Tells whether its process inherits the variable by which its library would join another's run."""

    name = "joining"
    joining_variables = ("JOINS_A_RUN",)

    def start(self, run_name: str, config: Mapping[str, object], *, tag: str = "") -> None:
        super().start(run_name, config, tag=tag)
        self._write(f"JOINS_A_RUN is {os.environ.get('JOINS_A_RUN')}")
