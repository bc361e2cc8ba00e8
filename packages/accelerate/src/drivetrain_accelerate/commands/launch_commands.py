"""The command lines and the variables of launches, for programs that start one by themselves."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from drivetrain_accelerate.commands.command_line import words_of_process
from drivetrain_accelerate.commands.launch_flags import words_of
from drivetrain_config import environ


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return the paths that a variable lists, joined by colons, with one more behind them."""
    return ":".join(
        [each for each in (environ.read(env_var_name) or "").split(":") if each] + [str(path_to_add)]
    )


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command that launches what `launch_command_parser` has parsed, and its environment."""
    return words_of_process(["launch", *words_of(args)]), environ.child_environment()


class PrepareForLaunch:
    """A function for `torch.multiprocessing.start_processes`, which tells each process its rank.

    Args:
        launcher: The function to run in each process.
        distributed_type: The way in which processes work together; the ranks are set in any case.
        debug: Whether the processes are on the CPU, and meet by the file that `ACCELERATE_DEBUG_RDV_FILE` names, as
            many as `WORLD_SIZE` says.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = distributed_type
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function as a rank; raise a RuntimeError if it shall meet others by a file that nobody names."""
        own = {"LOCAL_RANK": str(index), "RANK": str(index), "FORK_LAUNCHED": "1"}
        if self.debug:
            own |= _meet_by_file(index)
        elif environ.read("NODE_RANK") is not None:
            size = int(environ.read("NPROC") or environ.read("LOCAL_WORLD_SIZE") or 1)
            own["RANK"] = str(size * int(environ.read("NODE_RANK") or 0) + index)
        with environ.exported(**own):
            self.launcher(*args)


def _meet_by_file(rank: int) -> dict[str, str]:
    """Join a group on the CPU whose processes meet by a file, and return its variables. Called on all ranks.

    The group stays, as it does in Accelerate, which sets no variables of it: ours agree with the group.
    """
    file, size = environ.read("ACCELERATE_DEBUG_RDV_FILE"), environ.read("WORLD_SIZE")
    if not file or not size:
        raise RuntimeError(
            f"PrepareForLaunch(debug=True): ACCELERATE_DEBUG_RDV_FILE={file!r}, WORLD_SIZE={size!r} in the "
            "environment: set them to a new file and to the number of processes, or call debug_launcher(function, "
            "num_processes=2), which needs neither"
        )
    count = int(size)
    dist.init_process_group("gloo", rank=rank, world_size=count, store=dist.FileStore(file, count))
    return {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
