"""The `drivetrain launch` line of a job, and the settings that reach it through the environment. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain_config import Layers
from drivetrain_config.environ import override_name
from drivetrain_config.settings.schema import flag_name
from drivetrain_config.values.kinds import plain
from drivetrain_launcher.errors import LaunchError

# What the cluster decides for each node, and a line for all nodes cannot say.
_DECIDED = {"node_rank": "the rank of each node", "master_addr": "the address at which the nodes meet"}
# The request says these to the cluster, and the cluster to the launcher.
_REQUESTED = frozenset({"num_nodes", "num_processes", "processes_per_node", "shutdown_timeout_seconds"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """The launch inside a job: its words, and settings as variables, except the `withheld` secrets."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    withheld: tuple[str, ...]


def plan_launch_line(
    layers: Layers,
    target: tuple[str, ...],
    *,
    processes_per_node: int | None,
    shutdown_timeout_seconds: float,
) -> LaunchLine:
    """Plan the launch inside a job.

    Flags stay flags. A setting from a variable or a file becomes a variable of the job, whose launch looks for no
    file: the cluster need not have the file, and a later change does not reach a job in the queue. A LaunchError
    names a setting that the cluster decides.
    """
    flags = ["--config=none"]
    environment: dict[str, str] = {}
    withheld: list[str] = []
    for (section, field), (entry, *_) in layers.entries.items():
        if section == "launch" and field in _DECIDED:
            raise LaunchError(
                f"{field}={entry.shown} from {entry.source}: the cluster decides {_DECIDED[field]}; leave it out"
            )
        if section == "launch" and field in _REQUESTED:
            continue
        if entry.secret:
            withheld.append(override_name(section, field))
        elif entry.source.kind != "command line":
            environment[override_name(section, field)] = as_text(entry.value)
        elif isinstance(entry.value, bool):
            flags.append(flag_name(section, field, negated=not entry.value))
        else:
            flags.append(f"{flag_name(section, field)}={as_text(entry.value)}")
    if processes_per_node is not None:
        flags.append(f"--processes-per-node={processes_per_node}")
    flags.append(f"--shutdown-timeout-seconds={shutdown_timeout_seconds:g}")
    # A script whose name begins with a hyphen would be read as a flag.
    guard = ("--",) if target[0].startswith("-") else ()
    return LaunchLine(
        command=("drivetrain", "launch", *flags, *guard, *target),
        environment=environment,
        withheld=tuple(withheld),
    )


def as_text(value: Any) -> str:
    """Return a value as the text of a variable, from which `drivetrain_config` reads an equal value."""
    bare = plain(value)
    return bare if isinstance(bare, str) else json.dumps(bare)
