"""The process's environment. No other file of drivetrain reads or writes it."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from drivetrain_config.errors import ConfigError

CONFIG_VARIABLE = "DRIVETRAIN_CONFIG"
_PREFIX = "DRIVETRAIN_"
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRanks:
    """What a launcher of torchrun's kind tells a worker.

    Attributes:
        rank: This process among all.
        local_rank: This process among those of its node.
        world_size: Number of processes.
        local_world_size: Number of processes on this node.
        node_rank: This node among all.
        num_nodes: Number of nodes.
        master_addr: Host of the rendezvous store.
        master_port: Port of the rendezvous store.
        run_id: The run's name, the same on all ranks; "none" if the launcher gives none.
        agent_store: Whether the launcher's agent, not rank 0, hosts the store.
        restart_count: How often the agent has restarted the workers.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    run_id: str = "none"
    agent_store: bool = False
    restart_count: int = 0


def launched() -> LaunchedRanks | None:
    """Read torchrun's variables.

    Returns:
        The ranks; None in a process that no launcher started.

    Raises:
        ConfigError: Some of the variables are set and others are not, or one is no integer.
    """
    given = [name for name in _RANK_VARIABLES if name in os.environ]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    if missing := [name for name in _RANK_VARIABLES if name not in given]:
        raise ConfigError(
            f"the launcher's variables are set in part: {', '.join(given)} but not {', '.join(missing)}; start with "
            "`drivetrain launch` or torchrun, which set them all, or unset them"
        )
    world_size, local_rank = _integer("WORLD_SIZE"), _integer("LOCAL_RANK")
    local_world_size = _integer("LOCAL_WORLD_SIZE", default=world_size)
    return LaunchedRanks(
        rank=_integer("RANK"),
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_integer("GROUP_RANK", default=0),
        num_nodes=_integer("GROUP_WORLD_SIZE", default=max(1, world_size // max(1, local_world_size))),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=_integer("MASTER_PORT"),
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", "none"),
        agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart_count=_integer("TORCHELASTIC_RESTART_COUNT", default=0),
    )


def overrides() -> dict[str, str]:
    """The settings given as `DRIVETRAIN_<SECTION>__<FIELD>`, by variable name."""
    return {name: text for name, text in os.environ.items() if name.startswith(_PREFIX) and "__" in name}


def handed_down() -> str | None:
    """What the launcher resolved for this worker, as JSON; None without a launcher."""
    return os.environ.get(CONFIG_VARIABLE)


def read(name: str) -> str | None:
    """One variable that belongs to somebody else (a scheduler, a driver); None if it is not set."""
    return os.environ.get(name)


def child_environment(**variables: str | None) -> dict[str, str]:
    """A copy of the environment for a subprocess, with `variables` set, or left out where None."""
    return _merged(os.environ, variables)


@contextmanager
def exported(**variables: str | None) -> Generator[None]:
    """Set variables (None: unset them) for a third party that reads the environment, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    _apply(variables)
    try:
        yield
    finally:
        _apply(before)


def _apply(variables: Mapping[str, str | None]) -> None:
    for name, text in variables.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def _merged(base: Mapping[str, str], variables: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**base, **variables}
    return {name: text for name, text in merged.items() if text is not None}


def _integer(name: str, *, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment: must be an integer") from None
