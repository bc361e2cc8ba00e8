"""The facts of a host, and the differences between hosts."""

import platform
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import distributions

from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_messages import list_some

_SHOWN = 6


def own_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of this host, and the variables that all hosts should share, by name."""
    facts = {"python": platform.python_version(), "machine": platform.machine()}
    for distribution in distributions():
        name = distribution.name
        if name in ("torch", "numpy") or name.partition("-")[0] == "drivetrain":
            facts[name] = distribution.version
    for variable in sorted(environment):
        # Interfaces have other names on other hosts, by right.
        if variable.startswith(("NCCL_", "TORCH_NCCL_")) and not variable.endswith("_IFNAME"):
            facts[variable] = environment[variable]
    return facts


def host_label(rank: int, name: str, address: str | None) -> str:
    """Return a host's name in the report."""
    return f"host {rank} ({name}{f', {address}' if address else ''})"


def judge_facts(facts: Mapping[int, Mapping[str, str]], names: Mapping[int, str]) -> CheckReport:
    """Name the hosts that differ from most in a version or a variable; facts and names are by rank."""
    report = CheckReport()
    subjects = list(dict.fromkeys(subject for told in facts.values() for subject in told))
    for subject in subjects:
        values = {rank: told.get(subject, "none") for rank, told in sorted(facts.items())}
        usual, count = Counter(values.values()).most_common(1)[0]
        others = {rank: value for rank, value in values.items() if value != usual}
        if not others:
            continue
        shown = list_some((f"{value} on {names[rank]}" for rank, value in others.items()), most=_SHOWN)
        having = (
            names[next(rank for rank in values if rank not in others)] if count == 1 else f"{count} hosts"
        )
        what = f"{subject} differs: {shown}; {usual} on {having}"
        if subject.isupper():
            report.warning(
                what,
                why="NCCL may choose another algorithm on each host, and hang",
                repair=f"set {subject} to one value on all hosts, or unset it on all",
            )
            continue
        minors = {value.rpartition(".")[0] for value in values.values()}
        is_grave = subject == "torch" or (subject == "python" and len(minors) > 1)
        place = f", or a shared folder; pip install '{subject}=={usual}' there"
        judge = report.error if is_grave else report.warning
        judge(
            what,
            why="ranks may disagree on the order or the form of what they exchange, which fails late or hangs",
            repair="use one environment on all hosts: the same image"
            + (" or partition" if subject in ("python", "machine") else place),
        )
    report.summary = f"{len(facts)} hosts, {len(subjects)} versions and variables"
    if not report.findings:
        python = next(iter(facts.values()))["python"]
        report.summary = (
            f"{len(facts)} hosts agree on {len(subjects)} versions and variables (Python {python})"
        )
    return report
