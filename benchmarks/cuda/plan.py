"""Which tables are measured on a card, in which order, and for how long. Needs the standard library alone."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

KEPT = Path(__file__).resolve().parents[1] / "results" / "cuda"  # the tables of cards that are kept

ALL_SECONDS = 480.0
LEAST_SECONDS = 15.0  # what importing the libraries takes
DRY_SLACK = 4.0  # a dry run's limits end what hangs, also on a machine that does much else
MEASURED_SHARE = 0.5  # of a limit; the rest is for imports, weights and rounds that do not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script of this folder, which writes one file of tables.

    Attributes:
        name: The name of its tables and of its log.
        file: The script.
        limit_seconds: The most that it may take.
        flags: Its own arguments.
    """

    name: str
    file: str
    limit_seconds: float
    flags: tuple[str, ...] = ()

    def arguments(self, limit_seconds: float) -> list[str]:
        """Return its arguments under a limit that begins now."""
        seconds, deadline = limit_seconds * MEASURED_SHARE, time.time() + limit_seconds
        return [
            "--name",
            self.name,
            "--seconds",
            f"{seconds:.0f}",
            "--deadline",
            f"{deadline:.0f}",
            *self.flags,
        ]


# What matters most first. The first five have a goal.
SCRIPTS = (
    Script(name="small_step", file="small_step.py", limit_seconds=45),
    Script(name="gpt_step", file="gpt_step.py", limit_seconds=90),
    Script(name="fp8_recipes", file="fp8_recipes.py", limit_seconds=110),
    Script(name="save_held", file="save_held.py", limit_seconds=90),
    Script(name="offloaded_inference", file="offloaded_inference.py", limit_seconds=70),
    Script(name="loader_to_device", file="loader_to_device.py", limit_seconds=45),
    Script(name="gpt_fsdp", file="gpt_step.py", limit_seconds=45, flags=("--how", "fsdp")),
    Script(name="memory_peaks", file="memory_peaks.py", limit_seconds=40),
    Script(name="gpt_compiled", file="gpt_step.py", limit_seconds=120, flags=("--how", "compiled")),
)


def choose(only: Collection[str], *, kept: Collection[Path] = (KEPT,)) -> tuple[Script, ...]:
    """Return the scripts of these names, or all for no name: first those of which no table is in a folder of `kept`.

    Raises:
        ValueError: A name is none of a script.
    """
    known = [script.name for script in SCRIPTS]
    unknown = sorted(set(only) - set(known))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such table; there are {', '.join(known)}")
    chosen = [script for script in SCRIPTS if not only or script.name in only]
    return tuple(
        sorted(chosen, key=lambda script: any((folder / f"{script.name}.md").exists() for folder in kept))
    )


def limit_of(script: Script, left_seconds: float, *, slack: float = 1.0) -> float | None:
    """Return what a script may take of the time that is left; None if that is too little to begin.

    Args:
        script: The script.
        left_seconds: The time that is left for all.
        slack: A factor on the script's own limit.
    """
    return None if left_seconds < LEAST_SECONDS else min(script.limit_seconds * slack, left_seconds)
