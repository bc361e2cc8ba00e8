"""What a log call costs the training thread, also where the platform sleeps five seconds a call, or raises.

    uv run --group bench python benchmarks/tracking.py

drivetrain's platforms are written to by a process beside; those of Accelerate and Lightning Fabric are called in the
training thread. A platform that sleeps or raises is the same class for all: `Sleeping` and `Raising` below.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rounds import Table, installed, parse_arguments, repeated, report, take_turns

CALLS = 200  # in one turn
SETTLE_SECONDS = 0.5  # before each turn: the threads of the contestant before still write what it logged

VALUES: Mapping[str, Mapping[str, Any]] = {
    "a scalar": {"loss": 0.5},
    "50 scalars": {f"layer_{index}/norm": index / 7 for index in range(50)},
    "a tensor on the device, or on the CPU where there is none": {
        "loss": torch.tensor(0.5, device=torch.accelerator.current_accelerator(check_available=True) or "cpu")
    },
}

Log = Callable[[Mapping[str, Any]], None]


class Platform:
    """A platform of the three calls of drivetrain's trackers; it does nothing, at once."""

    name = "platform"
    on_all_ranks = False

    def __init__(self, directory: object = None) -> None:
        pass

    def start(self, run_name: str, config: object) -> None:
        """Start a run."""

    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Take values."""

    def finish(self) -> None:
        """End the run."""


class Sleeping(Platform):
    """A platform that is slow."""

    name = "sleeping"

    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:  # noqa: ARG002
        """Take values, after five seconds."""
        time.sleep(5)


class Raising(Platform):
    """A platform that is down."""

    name = "raising"

    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:  # noqa: ARG002
        """Raise."""
        raise OSError("503: service unavailable")


def drivetrain_log(stack: ExitStack, names: list[str]) -> Log:
    """drivetrain, with a log and platforms by their names."""
    from drivetrain import Accelerator

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    accelerator = Accelerator(
        project_dir=folder, log_with=names, sections={"tracking": {"drain_seconds": 0.1}}
    )
    accelerator.init_trackers("bench", {"lr": 0.1})
    stack.callback(accelerator.end_training)
    return lambda values: accelerator.log(values, step=1)


def accelerate_log(stack: ExitStack, platform: Platform | str) -> Log:
    """Accelerate, with TensorBoard or a tracker of the user's."""
    from accelerate.tracking import GeneralTracker, on_main_process

    from accelerate import Accelerator

    class Theirs(GeneralTracker):
        name = "theirs"
        requires_logging_directory = False
        tracker = None

        @on_main_process
        def store_init_configuration(self, values: dict[str, Any]) -> None: ...

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            assert not isinstance(platform, str)
            platform.log(values, step=step)

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    accelerator = Accelerator(
        log_with=platform if isinstance(platform, str) else Theirs(),
        project_dir=folder,
        cpu=not torch.cuda.is_available(),
    )
    accelerator.init_trackers("bench", {"lr": 0.1})
    stack.callback(accelerator.end_training)
    return lambda values: accelerator.log(dict(values), step=1)


def fabric_log(stack: ExitStack, kind: str) -> Log:
    """Lightning Fabric, with one of its loggers."""
    from lightning_fabric import Fabric
    from lightning_fabric.loggers import CSVLogger, TensorBoardLogger

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    logger = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}[kind](folder)
    fabric = Fabric(loggers=logger)
    return lambda values: fabric.log_dict(dict(values), step=1)


def caught(call: Callable[[], None]) -> Callable[[], None]:
    """The call, with what a platform raises caught, as a user would have to."""

    def run() -> None:
        try:
            call()
        except OSError:
            return

    return run


def healthy(stack: ExitStack) -> dict[str, Log]:
    """Platforms that work."""
    logs: dict[str, Log] = {
        "drivetrain, jsonl": drivetrain_log(stack, ["jsonl"]),
        "drivetrain, jsonl and TensorBoard": drivetrain_log(stack, ["jsonl", "tensorboard"]),
    }
    if installed("accelerate"):
        logs["Accelerate, TensorBoard"] = accelerate_log(stack, "tensorboard")
    if installed("lightning-fabric"):
        logs["Fabric, TensorBoardLogger"] = fabric_log(stack, "tensorboard")
        logs["Fabric, CSVLogger"] = fabric_log(stack, "csv")
    return logs


def settle() -> None:
    """Let background threads and processes end what they do."""
    time.sleep(SETTLE_SECONDS)


def main() -> None:
    """Measure, and write the tables."""
    arguments = parse_arguments(__doc__ or "", rounds=11)
    tables: list[Table] = []
    with ExitStack() as stack:
        logs = healthy(stack)
        for title, values in VALUES.items():
            turns = {
                name: repeated(lambda log=log, values=values: log(values), times=CALLS, before=settle)
                for name, log in logs.items()
            }
            tables.append(
                Table(
                    title=f"A call with {title}",
                    unit="us",
                    measured=take_turns(turns, rounds=arguments.rounds),
                )
            )
        here = f"{Path(__file__).stem}:"
        bad = {
            "drivetrain, a platform that sleeps 5 s": drivetrain_log(stack, [f"{here}Sleeping"]),
            "drivetrain, a platform that raises": drivetrain_log(stack, [f"{here}Raising"]),
        }
        if installed("accelerate"):
            bad["Accelerate, a platform that sleeps 5 s"] = accelerate_log(stack, Sleeping())
            bad["Accelerate, a platform that raises (caught by the user)"] = accelerate_log(stack, Raising())
        turns = {
            name: repeated(
                caught(lambda log=log: log(VALUES["a scalar"])),
                times=1 if "Accelerate, a platform that sleeps" in name else CALLS,
                before=settle,
            )
            for name, log in bad.items()
        }
        measured = take_turns(turns, rounds=3, warmup=0)
        tables.append(
            Table(
                title="A call with a scalar, to a platform that fails (3 rounds)",
                unit="us",
                measured=measured,
            )
        )
    report("tracking", tables, arguments)


if __name__ == "__main__":
    main()
