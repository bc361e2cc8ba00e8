"""The process's environment; no other module of drivetrain reads or writes it."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from drivetrain_config.errors import ConfigError

PREFIX = "DRIVETRAIN_"
CONFIG_VARIABLE = "DRIVETRAIN_CONFIG"
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
# Written by the process that is a rank, for those that inherit its environment: its process id and its launch.
_OWNER = "DRIVETRAIN_RANK_OWNER"
_LAUNCH = (*_RANKS, *_MEETING, "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """The ranks and rendezvous that torchrun, or a launcher like it, passes to a worker.

    Attributes:
        run_id: The run's name, the same on all ranks; "none" if the launcher sets none.
        agent_store: Whether the launcher's agent, not rank 0, hosts the store.
        restart_count: The number of times that the agent has restarted the workers.
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

    def __post_init__(self) -> None:
        """Check that the numbers are consistent."""
        for low, rank_name, rank, size_name, size in (
            (0, "RANK", self.rank, "WORLD_SIZE", self.world_size),
            (0, "LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size),
            (0, "GROUP_RANK", self.node_rank, "GROUP_WORLD_SIZE", self.num_nodes),
            (1, "LOCAL_WORLD_SIZE", self.local_world_size, "WORLD_SIZE + 1", self.world_size + 1),
            (0, "MASTER_PORT", self.master_port, "65536", 65536),
        ):
            if not low <= rank < size:
                bound = size_name if size_name.isdecimal() else f"{size_name} ({size})"
                raise ConfigError(
                    f"{rank_name}={rank} in the environment: must be at least {low} and below {bound}; start with "
                    "`drivetrain launch` or torchrun, which set these variables to fit together"
                )


def launched() -> RankEnvironment | None:
    """Read torchrun's variables; None in a process that no launcher started.

    MASTER_ADDR and MASTER_PORT alone do not imply a launcher: some clusters set them for every process. ConfigError
    if only some of the variables are set, one is not an integer, or they are inconsistent.
    """
    if not any(name in os.environ for name in _RANKS):
        return None
    # Without LOCAL_WORLD_SIZE, one node of 16 processes looks like two nodes of 8; a single process is unambiguous.
    alone = os.environ.get("WORLD_SIZE") == "1"
    needed = (*_RANKS, *_MEETING) if alone else (*_RANKS, "LOCAL_WORLD_SIZE", *_MEETING)
    if missing := [name for name in needed if name not in os.environ]:
        given = [name for name in needed if name in os.environ]
        raise ConfigError(
            f"the launcher's variables are set in part: {', '.join(given)} but not {', '.join(missing)}; start with "
            "`drivetrain launch` or torchrun, which set them all, or unset them"
        )
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    local_world_size = max(1, _integer("LOCAL_WORLD_SIZE", default=1))
    return RankEnvironment(
        rank=rank,
        local_rank=_integer("LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_integer("GROUP_RANK", default=rank // local_world_size),
        num_nodes=_integer("GROUP_WORLD_SIZE", default=-(-world_size // local_world_size)),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=_integer("MASTER_PORT"),
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", "none"),
        agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart_count=_integer("TORCHELASTIC_RESTART_COUNT", default=0),
    )


def own_rank() -> None:
    """Record in the environment that this process owns its rank's variables, to recognize its child processes.

    With a single rank, nothing is recorded, because its children wait for no other ranks.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        os.environ[_OWNER] = f"{os.getpid()} {_launch()}"


def inherited_from() -> int | None:
    """Return the id of the process from which this process inherited its rank's variables; None if it owns them."""
    owner, _, launch = os.environ.get(_OWNER, "").partition(" ")
    return int(owner) if owner not in ("", str(os.getpid())) and launch == _launch() else None


def override_name(section: str, field: str) -> str:
    """Return the environment variable that sets a field: `DRIVETRAIN_<SECTION>__<FIELD>`."""
    return f"{PREFIX}{section}__{field}".upper()


def overrides() -> dict[str, str]:
    """Return the variables that begin with `DRIVETRAIN_`, sorted by name, except those of a launch."""
    return {
        name: text
        for name, text in sorted(os.environ.items())
        if name.startswith(PREFIX) and name not in (CONFIG_VARIABLE, _OWNER)
    }


def handed_down() -> str | None:
    """Return the settings that the launcher read for this worker, as JSON; None without a launcher."""
    return os.environ.get(CONFIG_VARIABLE)


def read(name: str) -> str | None:
    """Return a variable of another program (a scheduler, a driver); None if it is not set."""
    return os.environ.get(name)


def child_environment(**variables: str | None) -> dict[str, str]:
    """Return a copy of the environment for a subprocess, with `variables` set, or removed where None."""
    merged: dict[str, str | None] = {**os.environ, **variables}
    return {name: text for name, text in merged.items() if text is not None}


@contextmanager
def exported(**variables: str | None) -> Generator[None]:
    """Run the block with variables set (or unset, where None) for a third party that reads the environment.

    The previous values are restored at the end, also after an exception. Other threads of the process see the change.
    """
    before = {name: os.environ.get(name) for name in variables}
    try:
        put(**variables)
        yield
    finally:
        put(**before)


def put(**variables: str | None) -> None:
    """Set variables (or unset them, where None) for the rest of the process.

    Other threads of the process see the change. Prefer `exported`, which ends with a block, where possible.
    """
    for name, text in variables.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def replace(environment: Mapping[str, str]) -> None:
    """Replace all variables, in a process that was just forked to become another process."""
    put(**{name: environment.get(name) for name in {*os.environ, *environment}})


def _launch() -> str:
    return " ".join(os.environ.get(name, "") for name in _LAUNCH)


def _integer(name: str, *, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment: must be an integer") from None
