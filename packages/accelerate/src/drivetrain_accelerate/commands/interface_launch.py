"""Launch a script written for Accelerate.

Programs that start a launch by themselves find its command line and its variables here too.
"""

from argparse import REMAINDER, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drivetrain_accelerate.commands.cluster_config import default_config_file
from drivetrain_accelerate.commands.command_line import (
    CustomArgumentParser,
    program_of,
    run_apart,
    words_of_process,
)
from drivetrain_accelerate.commands.launch_flags import add_flags, words_of
from drivetrain_config import Layers, environ
from drivetrain_config.files.found_file import SettingsFile, SettingsPlace, find_file
from drivetrain_config.source import Entry, Source
from drivetrain_launcher.cli.commands.launch import LaunchArguments
from drivetrain_launcher.cli.commands.launch import run as launch
from drivetrain_messages import argument

options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}

_THROUGH = ("launch", "through")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateLaunchArguments:
    """The arguments of `drivetrain accelerate launch`."""

    script: str = argument(
        ..., "Script to run; a module's name with -m, a program with --no_python.", positional=True
    )
    arguments: tuple[str, ...] = argument(
        (), "The script's own arguments, handed to it untouched.", rest=True
    )
    config: str = argument(
        "",
        "File of settings, drivetrain's or Accelerate's, --config_file too; none: not even one that is "
        "found. Unset: drivetrain's, where it is found, or else Accelerate's default_config.yaml.",
        brief="File of settings; none: not even a found one",
    )
    dry_run: bool = argument(
        False,
        "Print the plan, with each rank's command and environment; start nothing.",
        brief="Print the plan; start nothing",
    )
    layers: Layers = field(default_factory=lambda: Layers({}))


def run(arguments: AccelerateLaunchArguments) -> int:
    """Run a script written for Accelerate on one process or many, with the interface installed in each.

    Programs that start a launch by themselves find its command line and its variables here too.
    """
    layers = arguments.layers
    file = None
    if not arguments.config:
        file = find_file(Path.cwd(), environ.child_environment())
        own = Path(default_config_file)
        if file is None and own.is_file():
            place = SettingsPlace(folder=own.parent, stem=own.stem, title="Accelerate's own place")
            file = SettingsFile(path=own, place=place)
    if file is not None:
        joined = dict(layers.entries)
        for key, entries in Layers.read(file=file).entries.items():
            if of_file := tuple(entry for entry in entries if entry.source.kind == "file"):
                joined[key] = (*joined.get(key, ()), *of_file)
        layers = Layers(joined, file)
    program = layers.of_section("launch").get("program", ())
    if not (program and str(program[0].value).lower() == "true"):  # a program without Python runs as it is
        entry = Entry("drivetrain_accelerate", Source("command line", "drivetrain accelerate launch"))
        through = (entry, *layers.entries.get(_THROUGH, ()))
        layers = Layers({**layers.entries, _THROUGH: through}, layers.file)
    return launch(
        LaunchArguments(
            script=arguments.script,
            arguments=arguments.arguments,
            dry_run=arguments.dry_run,
            layers=layers,
        )
    )


def launch_command_parser(subparsers: Any = None) -> Any:
    """Return the parser of `accelerate launch`; add it to `subparsers` if given."""
    if subparsers is None:
        parser = CustomArgumentParser("accelerate launch", description="Run a script.", allow_abbrev=False)
    else:
        parser = subparsers.add_parser("launch", description="Run a script.", allow_abbrev=False)
        parser.set_defaults(func=launch_command)
    add_flags(parser)
    parser.add_argument("training_script", type=str, help="Script to run, a module with -m.")
    parser.add_argument("training_script_args", nargs=REMAINDER, help="The script's own arguments.")
    return parser


def launch_command(args: Namespace) -> None:
    """Run a parsed `accelerate launch` in a new process; raise CalledProcessError if it fails."""
    run_apart(["launch", *words_of(args)], is_quiet=bool(getattr(args, "quiet", None)))


# Which of them starts a launch is Accelerate's own matter: here, the flags decide.
simple_launcher = multi_gpu_launcher = deepspeed_launcher = launch_command


def clean_option(option: str) -> str | None:
    """Return a long flag's name in the namespace; None for a short flag."""
    return option.removeprefix("--").replace("-", "_") if option.startswith("--") else None


main = program_of("launch")


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return the paths in a variable and one more path, joined by colons."""
    return ":".join(
        [each for each in (environ.read(env_var_name) or "").split(":") if each] + [str(path_to_add)]
    )


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command of a parsed `accelerate launch`, and its environment."""
    return words_of_process(["launch", *words_of(args)]), environ.child_environment()


class PrepareForLaunch:
    """A function for `torch.multiprocessing.start_processes` that sets each process's rank and calls another.

    With `debug`, `WORLD_SIZE` processes on the CPU connect through the file that `ACCELERATE_DEBUG_RDV_FILE` names.
    The ranks are set for every `distributed_type`.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = distributed_type
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function as a rank; raise a RuntimeError if `debug` is true and no variable names the file."""
        own = {"LOCAL_RANK": str(index), "RANK": str(index), "FORK_LAUNCHED": "1"}
        if self.debug:
            own |= _meet_by_file(index)
        elif environ.read("NODE_RANK") is not None:
            size = int(environ.read("NPROC") or environ.read("LOCAL_WORLD_SIZE") or 1)
            own["RANK"] = str(size * int(environ.read("NODE_RANK") or 0) + index)
        with environ.exported(**own):
            self.launcher(*args)


def _meet_by_file(rank: int) -> dict[str, str]:
    """Join a process group on the CPU through a file, and return the group's variables. Called on all ranks.

    The group stays connected, as in Accelerate. Unlike in Accelerate, variables describe the group.
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
