"""What it costs to begin: importing, asking for help, launching an empty script and one that imports torch.

uv run --group bench python benchmarks/startup.py
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rounds import Table, installed, parse_arguments, report, take_turns

from drivetrain_config.environ import exported

BIN = Path(sys.executable).parent
# What an import adds to a process that has torch: measured inside, so that torch's own time does not drown it.
TIMED_IMPORT = "import torch, time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def command(*words: str) -> Callable[[], float]:
    """A turn: the seconds a command takes from start to end."""

    def turn() -> float:
        start = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.perf_counter() - start

    return turn


def imported(statement: str) -> Callable[[], float]:
    """A turn: the seconds an import takes in a fresh process that has imported torch."""

    def turn() -> float:
        code = TIMED_IMPORT.format(statement)
        return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)

    return turn


# Fails on its first attempt, so that the launcher starts the ranks again.
FAILS_ONCE = "import os, sys, torch\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"


def accelerate_launch(count: int) -> tuple[str, ...]:
    """The words that start `count` processes with Accelerate: with `--cpu` it starts one, whatever their number."""
    where = "--cpu" if count == 1 else "--multi_gpu"
    peer = ("launch", where, "--mixed_precision", "no", "--dynamo_backend", "no", "--num_machines", "1")
    return (str(BIN / "accelerate"), *peer, "--num_processes", str(count))


def launches(script: str, count: int, *flags: str) -> dict[str, Callable[[], float]]:
    """The launchers, with `count` processes; `flags` are torchrun's, which ours knows too."""
    contestants = {
        "torchrun": command(
            str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(count), *flags, script
        ),
        "drivetrain launch": command(
            str(BIN / "drivetrain"), "launch", "--cpu", "--num-processes", str(count), *flags, script
        ),
    }
    if count > 1:
        contestants["drivetrain launch --preload torch"] = command(
            str(BIN / "drivetrain"), "launch", "--cpu", "--num-processes", str(count), "--preload", "torch",
            *flags, script,
        )  # fmt: skip
    if installed("accelerate"):
        contestants["accelerate launch"] = command(
            *accelerate_launch(count), *(flag.replace("-", "_").replace("__", "--") for flag in flags), script
        )
    return contestants


def cases_with_torch(folder: Path) -> dict[str, tuple[str, dict[str, Callable[[], float]]]]:
    """The cases of scripts that import torch, as those that train do; as in `cases`."""
    imports, fails = folder / "imports.py", folder / "fails.py"
    imports.write_text("import torch\n")
    fails.write_text(FAILS_ONCE)
    one = {"python": command(sys.executable, str(imports)), **launches(str(imports), 1)}
    return {
        "Launch of a script that imports torch, one process": ("s", one),
        "Launch of a script that imports torch, two processes": ("s", launches(str(imports), 2)),
        "Launch of a script that imports torch, eight processes": ("s", launches(str(imports), 8)),
        "The same with two processes, which fail and are started again": (
            "s",
            launches(str(fails), 2, "--max-restarts", "1"),
        ),
    }


def cases(script: str) -> dict[str, tuple[str, dict[str, Callable[[], float]]]]:
    """Title to unit and contestants; the first of each is what the others are held against."""
    python, drivetrain, torchrun = sys.executable, str(BIN / "drivetrain"), str(BIN / "torchrun")
    launch = (drivetrain, "launch", "--num-processes")
    imports = {"from drivetrain import Accelerator": imported("from drivetrain import Accelerator")}
    helps = {
        "torchrun --help": command(torchrun, "--help"),
        "drivetrain --help": command(drivetrain, "--help"),
    }
    one = {"python": command(python, script), "drivetrain launch": command(*launch, "1", script)}
    two = {
        "torchrun": command(torchrun, "--standalone", "--nproc-per-node", "2", script),
        "drivetrain launch": command(*launch, "2", script),
    }
    if installed("accelerate"):
        imports["from accelerate import Accelerator"] = imported("from accelerate import Accelerator")
        helps["accelerate --help"] = command(str(BIN / "accelerate"), "--help")
        one["accelerate launch"] = command(*accelerate_launch(1), script)
        two["accelerate launch"] = command(*accelerate_launch(2), script)
    if installed("lightning-fabric"):
        imports["from lightning_fabric import Fabric"] = imported("from lightning_fabric import Fabric")
    return {
        "Import beyond `import torch`": ("ms", imports),
        "Help": ("s", helps),
        "Launch of an empty script, one process": ("s", one),
        "Launch of an empty script, two processes": ("s", two),
    }


def main() -> None:
    """Time every case, or those that --only names."""
    arguments = parse_arguments(
        __doc__, rounds=9, only="only the cases whose title has this, such as 'two processes'"
    )
    # The compiled files are kept, as where packages are installed, whatever this machine's habit is.
    with (
        tempfile.TemporaryDirectory() as folder,
        exported(PYTHONPYCACHEPREFIX=folder, PYTHONDONTWRITEBYTECODE=""),
    ):
        script = Path(folder) / "empty.py"
        script.write_text("")
        tables = [
            Table(title=title, unit=unit, measured=take_turns(contestants, rounds=arguments.rounds))
            for title, (unit, contestants) in {**cases(str(script)), **cases_with_torch(Path(folder))}.items()
            if arguments.only in title
        ]
    report("startup", tables, arguments)


if __name__ == "__main__":
    main()
