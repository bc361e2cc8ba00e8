"""NAME=VALUE arguments: options of a cluster and variables of a job."""

import re
from collections.abc import Callable, Iterable

from drivetrain_launcher.errors import LaunchError

# What the launcher, or the cluster, sets for each process.
_LAUNCHERS = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "DRIVETRAIN_CONFIG",
    }
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def read_options(pairs: Iterable[str]) -> dict[str, str]:
    """Return the options of a cluster by name."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (equals and name):
            raise LaunchError(f"--option {pair}: say NAME=VALUE, such as --option partition=gpu")
        _add("--option", name, value, found)
    return found


def read_variables(pairs: Iterable[str], inherited: Callable[[str], str | None]) -> dict[str, str]:
    """Return the variables of a job by name, from NAME=VALUE, or NAME for the value that `inherited` returns."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if _VARIABLE.fullmatch(name) is None:
            raise LaunchError(
                f"--env {pair}: {name!r} is no name of a variable; letters, digits and underscores are allowed"
            )
        if name in _LAUNCHERS:
            raise LaunchError(f"--env {name}: the launcher sets it for each process; leave it out")
        if not equals:
            here = inherited(name)
            if here is None:
                raise LaunchError(f"--env {name}: it is not set here; say --env {name}=VALUE")
            value = here
        _add("--env", name, value, found)
    return found


def _add(flag: str, name: str, value: str, found: dict[str, str]) -> None:
    if found.setdefault(name, value) != value:
        raise LaunchError(f"{flag} {name}={value}: contradicts {flag} {name}={found[name]}; keep one")
