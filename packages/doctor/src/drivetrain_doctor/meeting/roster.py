"""The hosts that came to the meeting, and those that did not."""

from collections.abc import Mapping, Sequence

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckVerdict, error

_SHOWN = 16


def judge_roster(num_hosts: int, labels: Mapping[int, str], checked: CheckedRun) -> CheckVerdict:
    """Name the hosts that did not come."""
    missing = [rank for rank in range(num_hosts) if rank not in labels]
    summary = f"{len(labels)} of {num_hosts} hosts at {checked.master_addr}:{checked.master_port}"
    if not missing:
        return CheckVerdict(summary=summary)
    finding = error(
        f"{list_hosts(missing)} did not come within {checked.wait_seconds:g} s",
        why="a run waits for all of its hosts until --rdzv-timeout-seconds, and then fails",
        mend="start drivetrain doctor there with the same flags and its own --node-rank; its output says why "
        "it does "
        f"not reach {checked.master_addr}:{checked.master_port}",
        missing=", ".join(map(str, missing)),
    )
    return CheckVerdict(summary=summary, findings=(finding,))


def list_hosts(ranks: Sequence[int]) -> str:
    """Return hosts by their ranks in words, the first of many."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"host {shown}" if len(ranks) == 1 else f"hosts {shown}"
