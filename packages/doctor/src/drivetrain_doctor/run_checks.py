"""Run checks one after another, each within its time limit."""

import time
from collections.abc import Callable, Iterable

from drivetrain_doctor.doctor_finding import Check, CheckReport, CheckVerdict, error
from drivetrain_doctor.time_limit import within

# A check of one host takes milliseconds; one that writes to a disk takes two seconds.
LIMIT_SECONDS = 10.0


def run_checks(
    checks: Iterable[Check], *, progress: Callable[[str], None], limit_seconds: float = LIMIT_SECONDS
) -> tuple[CheckReport, ...]:
    """Run checks in order, each after a call of `progress` with its name, and return what each found."""
    reports: list[CheckReport] = []
    for check in checks:
        progress(check.name)
        reports.append(run_check(check, limit_seconds=limit_seconds))
    return tuple(reports)


def run_check(check: Check, *, limit_seconds: float) -> CheckReport:
    """Run one check in a thread, which is left behind if it hangs, as on a dead file server: that is itself an error.

    After an OSError the check counts as skipped; other errors are raised.
    """
    begin = time.monotonic()
    try:
        verdict = within(limit_seconds, check.run, name=f"doctor-{check.name}")
    except TimeoutError:
        hung = error(
            f"did not end within {limit_seconds:g} s",
            why="what hangs here, most often a file server, a name server or a driver, hangs a run too",
            mend=f"look at what {check.name} asks, one by one (ls of the folder, getent hosts NAME, nvidia-smi)",
            limit_seconds=limit_seconds,
        )
        verdict = CheckVerdict(summary="no end", findings=(hung,))
    except OSError as failure:
        verdict = CheckVerdict(skipped=f"could not be measured ({failure})")
    return report_of(check.name, verdict, seconds=time.monotonic() - begin)


def report_of(name: str, verdict: CheckVerdict, *, seconds: float = 0.0) -> CheckReport:
    """Return the report of a check from its verdict."""
    return CheckReport(
        name=name,
        summary=verdict.summary if verdict.skipped is None else verdict.skipped,
        is_skipped=verdict.skipped is not None,
        findings=verdict.findings,
        seconds=round(seconds, 3),
    )
