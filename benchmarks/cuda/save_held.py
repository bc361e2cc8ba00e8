"""How long a save of 4 GB of weights and AdamW's state holds training, beside the time until it is written.

Held is what a step takes longer that follows the begin of a save, to its end on the device. With `staging="overlap"`
that step's forward and backward run while the state is copied. A save is written beside the last one, which is then
deleted.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench import Bench, Goal, Measured, Table, begin
from plain_files import Raw

from checkpoint import Replaced, Run, dcp_state

LAYERS, WIDTH, ITEMS = 80, 2048, 4096  # 4.03 GB; a step of some 0.1 s on an H100 in fp32
LAYER_BYTES = WIDTH * WIDTH * 12  # in fp32, with AdamW's two states
DISK_BYTES = 256 * 2**20
MOST_HELD = 0.03  # of the write
OURS = ("drivetrain, copy", "drivetrain, overlap")
# What trains, what begins a save, what waits for it.
Save = tuple[Run, Callable[[], object], Callable[[], object]]


class HeldSaves:
    """A contestant: saves of a run, each of which is followed by a step.

    Args:
        bench: The device.
        save: The run, its begin of a save, and its wait.
        batch: Of a step.

    Attributes:
        held: Seconds of each save.
        written: Seconds of each until it was written, by its library's measure.
    """

    def __init__(self, bench: Bench, save: Save, batch: torch.Tensor) -> None:
        self._bench, (self._run, self._begin, self._wait), self._batch = bench, save, batch
        self.held: list[float] = []
        self.written: list[float] = []

    def step(self) -> None:
        """Train one step, to its end on the device."""
        run = self._run
        run.accelerator.backward(run.model(self._batch).square().mean())
        run.optimizer.step()
        run.optimizer.zero_grad()
        self._bench.synchronise()

    def turn(self) -> float:
        """Save once; the seconds that training was held."""
        self.step()
        start = time.perf_counter()
        self.step()
        quiet = time.perf_counter() - start
        start = time.perf_counter()
        self._begin()
        self.step()
        self.held.append(max(0.0, time.perf_counter() - start - quiet))
        self._wait()
        self.written.append(time.perf_counter() - start)
        return self.held[-1]


def by_drivetrain(folder: Path, staging: str, **sizes: Any) -> Save:
    """Drivetrain's save in the background."""
    run = Run("drivetrain", folder, staging=staging, **sizes)
    return run, lambda: run.accelerator.save_state(background=True), run.accelerator.wait_for_save


def by_dcp(folder: Path, **sizes: Any) -> Save:
    """The save of torch's DCP in the background, of a run like the others."""
    run, target = Run("drivetrain", folder / "run", **sizes), Replaced(folder / "dcp")
    pending: list[Any] = []

    def save() -> None:
        state = dcp_state(run)
        pending.append(dcp.async_save(state, checkpoint_id=target.begin()))

    def wait() -> None:
        pending.pop().result()
        target.end()

    return run, save, wait


def by_accelerate(folder: Path, **sizes: Any) -> Save:
    """Accelerate's save, which is over when it returns."""
    run, target = Run("accelerate", folder, **sizes), Replaced(folder / "saved")
    return run, lambda: target.save(run.accelerator.save_state), lambda: None


def affordable_layers(bytes_per_second: float, seconds: float) -> int:
    """Return the layers whose saves fit the time: four contestants, three saves each; at most 4 GB, at least 0.4."""
    affordable = bytes_per_second * seconds / 12 / LAYER_BYTES
    return min(LAYERS, max(LAYERS // 10, int(affordable)))


def disk_rate(folder: Path) -> float:
    """Return the bytes a second of a plain write, on the disk when it returns."""
    raw = Raw([torch.ones(DISK_BYTES, dtype=torch.uint8)], folder)
    start = time.perf_counter()
    raw.write()
    return DISK_BYTES / (time.perf_counter() - start)


def makers(bench: Bench, sizes: Mapping[str, Any]) -> dict[str, Callable[[], Save]]:
    """Return what makes the contestants."""
    root = bench.disk
    found: dict[str, Callable[[], Save]] = {
        "drivetrain, copy": lambda: by_drivetrain(root / "copy", "copy", **sizes),
        "drivetrain, overlap": lambda: by_drivetrain(root / "overlap", "overlap", **sizes),
    }
    if bench.has("Accelerate"):
        found["Accelerate"] = lambda: by_accelerate(root / "accelerate", **sizes)
    return {**found, "torch's async_save": lambda: by_dcp(root, **sizes)}


def measure(bench: Bench) -> None:
    """Have the contestants save in turns, and tell what each held and wrote."""
    rate = disk_rate(bench.disk)
    layers, width = bench.sized((affordable_layers(rate, bench.seconds), WIDTH), (2, 64))
    sizes: dict[str, Any] = {"layers": layers, "width": width, "device": bench.device}
    batch = torch.ones(bench.sized(ITEMS, 4), width, device=bench.device)
    saves: dict[str, HeldSaves] = {}
    for name, make in makers(bench, sizes).items():
        with bench.attempt(name, ours=name.startswith("drivetrain")):
            contestant = HeldSaves(bench, make(), batch)
            contestant.turn()  # it takes its memory
            saves[name] = contestant
    firsts = [f"{name} {each.held[0]:.3g} s of {each.written[0]:.3g} s" for name, each in saves.items()]
    bench.tell(f"The disk takes {rate / 1e9:.2g} GB/s of a plain write.")
    bench.tell(
        f"The first save of each, which takes its host memory, held training for: {'; '.join(firsts)}."
    )

    def rows(held: Measured) -> Measured:
        shown: dict[str, Sequence[float]] = {}
        for name, seconds in held.items():
            shown[f"{name}: write"] = saves[name].written[-len(seconds) :]
            shown[f"{name}: held"] = seconds
        return shown

    title = f"A save of {layers * width**2 * 12 / 1e9:.2g} GB"
    goals = [Goal(of=f"{name}: held", beside=f"{name}: write", most=MOST_HELD) for name in OURS]
    goals.append(Goal(of="drivetrain, overlap: held", beside="Accelerate: held", most=1.0))
    table = Table(title=title, unit="s", measured={}, goals=goals, digits=3)
    bench.measure(table, {name: each.turn for name, each in saves.items()}, rows=rows, warmup=0)


def main() -> None:
    """Save, in turns."""
    bench = begin(__doc__ or "", rounds=7)
    measure(bench)
    bench.finish()


if __name__ == "__main__":
    main()
