"""Read the values of a job request: a cluster's own options, sizes of memory, and words for a process."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobRequest, Submission
from drivetrain_messages import parse_size, suggest

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}


class OptionReader:
    """A reader of a request's options, by name and in the form that each option needs.

    An option that the cluster does not have is refused; the message gives the nearest option and all options.
    """

    def __init__(self, cluster: str, options: Mapping[str, str], known: Collection[str]) -> None:
        for name, value in options.items():
            if name not in known:
                raise ClusterError(
                    f"--option {name}={value}: {cluster} has no such option{suggest(name, known)}; there are "
                    f"{', '.join(sorted(known))}"
                )
        self._options = options

    def matching(self, name: str, form: re.Pattern[str], what: str) -> str | None:
        """Return an option that matches a pattern as a whole; None if it is not given."""
        value = self._options.get(name)
        if value is not None and form.fullmatch(value) is None:
            raise ClusterError(f"--option {name}={value}: must be {what}")
        return value

    def several(self, name: str, form: re.Pattern[str], what: str) -> tuple[str, ...]:
        """Return the comma-separated items of an option, each of which matches a pattern as a whole."""
        if name not in self._options:
            return ()
        items = tuple(item.strip() for item in self._options[name].split(","))
        for item in items:
            if form.fullmatch(item) is None:
                raise ClusterError(
                    f"--option {name}={self._options[name]}: {item!r} must be {what}; several stand between commas"
                )
        return items

    def number(self, name: str, *, least: int, most: int = 2**31 - 1) -> int | None:
        """Return an option that is an integer; None if it is not given."""
        text = self.matching(name, re.compile(r"[0-9]{1,10}", re.ASCII), f"a number from {least} to {most}")
        if text is not None and not least <= int(text) <= most:
            raise ClusterError(f"--option {name}={text}: must be a number from {least} to {most}")
        return None if text is None else int(text)

    def truth(self, name: str) -> bool:
        """Return an option that is true or false; False if it is not given."""
        text = self._options.get(name, "false")
        if text.lower() not in _TRUTH:
            raise ClusterError(f"--option {name}={text}: say true or false")
        return _TRUTH[text.lower()]


def memory_bytes(text: str) -> int:
    """Return the bytes that a text states, such as 64GB for powers of 1000 or 64GiB for powers of 1024."""
    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    if size < 1:
        raise ClusterError(f"memory {text!r}: say a number and a unit, such as 64GB, 64GiB or 512MB")
    return size


def check_request(cluster: str, request: JobRequest) -> None:
    """Refuse a request without a command, with words that no process can receive, or without time to train."""
    if not request.command:
        raise ClusterError(
            f"{cluster}: the job has no command: say what each node runs, such as drivetrain launch train.py"
        )
    if any("\0" in word for word in (*request.command, *request.environment.values())):
        raise ClusterError(
            f"{cluster}: a word of the command or a variable holds a null character, which no command can"
        )
    for name in request.environment:
        if not _VARIABLE.fullmatch(name):
            raise ClusterError(
                f"{cluster}: {name!r} is no name of a variable: letters, digits and _ are allowed"
            )

    limit = request.time_limit_seconds
    if limit is not None and limit <= request.save_seconds:
        raise ClusterError(
            f"{cluster}: time_limit_seconds={limit}: leaves no time to train, since the job is told to save "
            f"save_seconds={request.save_seconds} before the limit; say a longer limit, or fewer seconds to save"
        )


def file_stem(request: JobRequest) -> str:
    """Return a file name, without its ending, made from the name of a job."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", request.name).strip("-.")[:60] or "job"


def job_file(submission: Submission, job_id: str, ending: str) -> Path:
    """Return the path of a file in the folder of the job's script: the output, ".out", or the exit code, ".code"."""
    script = next(iter(submission.files))
    return script.with_name(f"{script.stem}-{job_id}{ending}")


def launch_variables(request: JobRequest) -> dict[str, str]:
    """Return the variables of a job, and variables that tell its launchers the time to save and their processes."""
    own = {"DRIVETRAIN_LAUNCH__SHUTDOWN_TIMEOUT_SECONDS": str(request.save_seconds)}
    if request.processes_per_node is not None:
        own["DRIVETRAIN_LAUNCH__PROCESSES_PER_NODE"] = str(request.processes_per_node)
    return {**own, **request.environment}
