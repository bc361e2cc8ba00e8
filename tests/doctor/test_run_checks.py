import time
from threading import Event

import pytest

from drivetrain_doctor.doctor_finding import Check, CheckReport
from drivetrain_doctor.run_checks import run_check, run_checks


def judged(*severities: str) -> CheckReport:
    found = CheckReport("summary")
    for severity in severities:
        judge = found.error if severity == "error" else found.warning
        judge("what", why="why", repair="repair", number=3.0)
    return found


@pytest.mark.parametrize(
    ("severities", "state"), [((), "ok"), (("warning",), "warning"), (("warning", "error"), "error")]
)
def test_the_worst_finding_is_the_state(severities: tuple[str, ...], state: str) -> None:
    report = run_check(Check(name="check", run=lambda: judged(*severities)), limit_seconds=30)
    assert report.state == state
    assert CheckReport.from_data(report.as_data()) == report  # survives its way between hosts


def test_checks_run_in_order_with_progress() -> None:
    shown: list[str] = []
    checks = [Check(name=name, run=judged) for name in ("first", "second")]
    assert (
        [report.name for report in run_checks(checks, progress=shown.append)] == shown == ["first", "second"]
    )


def test_a_check_that_hangs_is_an_error_within_its_time() -> None:
    never = Event()
    begin = time.monotonic()
    report = run_check(
        Check(name="stuck", run=lambda: CheckReport(summary=str(never.wait(300)))), limit_seconds=0.2
    )
    never.set()
    assert time.monotonic() - begin < 60
    assert report.state == "error"
    assert report.findings[0].what == "did not end within 0.2 s"


def test_what_cannot_be_measured_is_skipped_with_its_reason() -> None:
    def refuse() -> CheckReport:
        raise PermissionError(13, "Permission denied", "/proc/x")

    report = run_check(Check(name="refused", run=refuse), limit_seconds=30)
    assert report.state == "skipped"
    assert report.summary == "could not be measured ([Errno 13] Permission denied: '/proc/x')"


def test_a_mistake_in_a_check_is_raised() -> None:
    def fail() -> CheckReport:
        raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake"):
        run_check(Check(name="wrong", run=fail), limit_seconds=30)
