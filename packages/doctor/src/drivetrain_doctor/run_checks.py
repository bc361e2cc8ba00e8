"""Run checks one after another, each within its time limit."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from drivetrain_doctor.doctor_finding import Check, CheckReport

_Result = TypeVar("_Result")

# A check of one host takes milliseconds; one that writes to a disk takes two seconds.
LIMIT_SECONDS = 10.0


def run_checks(
    checks: Iterable[Check], *, progress: Callable[[str], None], limit_seconds: float = LIMIT_SECONDS
) -> tuple[CheckReport, ...]:
    """Run checks in order, call `progress` with the name of each, and return the reports."""
    reports: list[CheckReport] = []
    for check in checks:
        progress(check.name)
        reports.append(run_check(check, limit_seconds=limit_seconds))
    return tuple(reports)


def run_check(check: Check, *, limit_seconds: float) -> CheckReport:
    """Run one check within a time limit: a hang becomes a finding, and an OSError skips the check."""
    begin = time.monotonic()
    try:
        report = within(limit_seconds, check.run, name=f"doctor-{check.name}")
    except TimeoutError:
        report = CheckReport("did not end")
        report.error(
            f"did not end within {limit_seconds:g} s",
            why="a file server, a name server or a driver hangs, most likely, and a run will hang too",
            repair="find which of them hangs: ls FOLDER, getent hosts NAME, nvidia-smi",
            limit_seconds=limit_seconds,
        )
    except OSError as failure:
        report = CheckReport(f"could not be measured ({failure})", is_skipped=True)
    return replace(report, name=check.name, seconds=round(time.monotonic() - begin, 3))


def within(seconds: float, call: Callable[[], _Result], *, name: str) -> _Result:
    """Return the result of a call within a time limit, such as a call that waits for a driver.

    Raises:
        TimeoutError: The call took longer. The call's thread, named `name`, ends with the process at the latest.
    """
    answers: SimpleQueue[tuple[_Result, None] | tuple[None, BaseException]] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put((call(), None))
        except BaseException as failure:  # noqa: BLE001 raised again by the caller's thread
            answers.put((None, failure))

    threading.Thread(target=answer, daemon=True, name=name).start()
    try:
        result, failure = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"{name} did not end within {seconds:g} s") from None
    if failure is not None:
        raise failure
    return result  # pyright: ignore[reportReturnType] a call without a failure has a result
