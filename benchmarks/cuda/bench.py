"""What the scripts of this folder share: their arguments, their device, and tables that are written as they come."""

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from card import describe
from rounds import Goal, Table, repeated, take_turns, write

PEERS: Mapping[str, tuple[str, ...]] = {  # a library -> modules of which one brings it
    "Accelerate": ("accelerate",),
    "Lightning Fabric": ("lightning_fabric", "lightning"),
    "torchao": ("torchao",),
    "Transformer Engine": ("transformer_engine",),
}
Measured = Mapping[str, Sequence[float]]  # seconds of each contestant, one a round
Size = TypeVar("Size")


@dataclass(slots=True, kw_only=True)
class Bench:
    """One script's device, its sizes, and what it has measured so far.

    Attributes:
        name: The name of its file of tables.
        device: What it measures.
        dry: Whether everything is tiny, to see that it runs.
        seconds: For all rounds that count.
        rounds: The most rounds.
        results: The folder of the tables.
        disk: An empty folder, for what is saved and offloaded.
        options: The script's own arguments.
        note: What stands above the tables.
        failures: Contestants of ours, and plain torch, that could not be measured.
        deadline: When the script will be ended, by `time.time`.
    """

    name: str
    device: torch.device
    dry: bool
    seconds: float
    rounds: int
    results: Path
    disk: Path
    options: argparse.Namespace
    note: str
    tables: list[Table] = field(default_factory=list[Table])
    failures: list[str] = field(default_factory=list[str])
    deadline: float = math.inf

    def seconds_for_rounds(self, share: float = 1.0) -> float:
        """Return the time for rounds: a share of the script's own, but no more than what is left, less a tenth."""
        return min(self.seconds * share, self.deadline - time.time() - self.seconds / 5)

    def sized(self, full: Size, dry: Size) -> Size:
        """Return one of two sizes."""
        return dry if self.dry else full

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def turns(
        self, calls: Mapping[str, Callable[[], object]], *, times: int
    ) -> dict[str, Callable[[], float]]:
        """Return turns of many calls each, to their end on the device."""
        return {
            name: repeated(call, times=times, before=self.synchronise, after=self.synchronise)
            for name, call in calls.items()
        }

    def measure(
        self,
        table: Table,
        turns: Mapping[str, Callable[[], float]],
        *,
        rows: Callable[[Measured], Measured] = dict,
        share: float = 1.0,
        warmup: int = 1,
    ) -> None:
        """Have contestants take turns, and write the table after each round.

        Args:
            table: The table, without what is measured.
            turns: The contestants; nothing is measured without any.
            rows: Returns the table's rows, from what was measured.
            share: The part of the script's time.
            warmup: Rounds that do not count; none in a dry run.
        """
        if not turns:
            return
        place = len(self.tables)

        def on_round(measured: Measured) -> None:
            num_rounds = len(next(iter(measured.values())))
            told = f"{table.title}; {num_rounds} round{'s' if num_rounds > 1 else ''}"
            self.tables[place:] = [replace(table, title=told, measured=rows(measured))]
            self.write()

        take_turns(
            turns, rounds=self.rounds, warmup=0 if self.dry else warmup,
            within_seconds=self.seconds_for_rounds(share), on_round=on_round,
        )  # fmt: skip

    def add(self, table: Table) -> None:
        """Add a table that was measured otherwise, and write."""
        self.tables.append(table)
        self.write()

    def tell(self, text: str) -> None:
        """Add a sentence above the tables, and write."""
        self.note = f"{self.note}\n\n{text}"
        self.write()

    def write(self) -> None:
        """Write what there is."""
        told = argparse.Namespace(rounds=f"up to {self.rounds}", results=self.results)
        write(self.name, self.tables, told, note=self.note)

    def has(self, library: str) -> bool:
        """Return whether a peer is there, and name it where it is not."""
        found = [spec for module in PEERS[library] if (spec := find_spec(module)) is not None]
        there = any(
            spec.origin is not None for spec in found
        )  # a folder of that name on the path is no library
        if not there:
            self.leave_out(library, "not installed")
        return there

    def leave_out(self, name: str, why: str) -> None:
        """Name what is not measured, once, in the log and above the tables."""
        text = f"Left out: {name} ({why})."
        if text not in self.note:
            print(f"left out: {name} ({why})", flush=True)
            self.tell(text)

    @contextmanager
    def attempt(self, name: str, *, ours: bool) -> Generator[None]:
        """Go on without a contestant that raises; where it is `ours`, the script fails at its end."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever a library raises; the other contestants are measured
            traceback.print_exc()
            self.leave_out(name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            if ours:
                self.failures.append(name)

    def made(self, makers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Make the contestants and let each do its work once, which may compile it.

        Those that raise are left out, and those that would be made in the time of the rounds.
        """
        found: dict[str, Any] = {}
        for name, make in makers.items():
            if self.deadline - time.time() < self.seconds:
                self.leave_out(name, "the time to make it was over")
                continue
            with self.attempt(name, ours=name.partition(",")[0] not in PEERS):
                call = make()
                call()
                self.synchronise()
                found[name] = call
        return found

    def finish(self) -> None:
        """Write, print, and end the script with 1 where something of ours failed."""
        self.write()
        print((self.results / f"{self.name}.md").read_text())
        if self.failures:
            sys.exit(f"failed: {', '.join(self.failures)}")


def begin(
    description: str, *, rounds: int, more: Callable[[argparse.ArgumentParser], object] | None = None
) -> Bench:
    """Read the arguments of a script.

    Args:
        description: Its docstring.
        rounds: The most rounds that count.
        more: A function that adds arguments of its own.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--name", default=Path(sys.argv[0]).stem)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--disk", type=Path, required=True, help="an empty folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all rounds that count")
    parser.add_argument(
        "--deadline", type=float, default=math.inf, help="when it will be ended, by time.time"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="the most rounds that count")
    if more is not None:
        more(parser)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif options.dry:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    return Bench(
        name=options.name, device=device, dry=options.dry, seconds=options.seconds,
        rounds=1 if options.dry else options.rounds, results=options.results, disk=options.disk, options=options,
        note=f"Measured on: {describe(device)}.", deadline=options.deadline,
    )  # fmt: skip


__all__ = ["PEERS", "Bench", "Goal", "Measured", "Table", "begin"]
