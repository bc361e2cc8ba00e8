"""Training that is killed, whose disk fills, whose files are damaged: round after round, against a run that is not.

    python drill.py FAULT ROUNDS WORLD_SIZE DIRECTORY SEED [BACKEND]

Each round goes on where the newest good checkpoint is, in processes that are forked off this one, which has imported
everything. What every rank logs, loss and samples of each step, must be what the unbroken run logged, bit by bit, and
the newest good checkpoint must hold the weights that the unbroken run had at its step.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator
from drivetrain_checkpoint import (
    Checkpointer,
    CheckpointInfo,
    CheckpointLockedError,
    CorruptCheckpointError,
    NoCheckpointError,
    OtherRankFailedError,
    find_checkpoints,
)
from drivetrain_checkpoint.format.checksummed_io import HashedReader, HashedWriter
from drivetrain_checkpoint.saving import writer_lock
from drivetrain_checkpoint.storage import direct_writer as disk_writer
from drivetrain_state import Context, Topology
from processes import free_port, rank_environment

# Imported once, before the forks, what a run imports when it comes to it: torch's optimizers at their first step
# alone take longer than a round.
IMPORTS = [
    "torch._dynamo", "drivetrain_backends.ddp.backend", "drivetrain_backends.composed.single_device",
    "drivetrain_checkpoint.saving.coordinator", "drivetrain_checkpoint.loading.collective_load",
    "drivetrain_checkpoint.loading.part_reader", "drivetrain_checkpoint.saving.store_gather",
]  # fmt: skip
STEPS = 30
LONGEST_SECONDS = 0.1  # from the line that a kill waits for to the kill: some saves
WIDTH = 160


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is filled with its number's sine."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.sin(torch.arange(WIDTH) * (index + 1.0)), index


def train(
    directory: Path,
    rank: int,
    log: Path,
    *,
    backend: str = "usual",
    steps: int = STEPS,
    on_step: Callable[[int], None] = lambda _: None,
    before_load: Callable[[], None] = lambda: None,
) -> None:
    """Train from the newest checkpoint to the last step, saving after each."""
    staging = "overlap" if backend == "usual" else "copy"
    quiet = {
        "checkpoint": {"keep_last": 2, "stall_seconds": 3, "staging": staging},
        "state": {"watchdog": False},
    }
    accelerator = Accelerator(
        cpu=True,
        backend=None if backend == "usual" else backend,
        project_dir=directory,
        seed=3,
        sections=quiet,
    )
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Samples(), batch_size=3, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    before_load()
    with suppress(NoCheckpointError):  # in the first round, or when all of them are damaged
        step = accelerator.load_state()
    with log.open("a") as file:
        while step < steps:
            for items, indices in loader:
                loss = model(items).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                said = {"rank": rank, "step": step, "loss": loss.item().hex(), "samples": indices.tolist()}
                weights = accelerator.get_state_dict(model)
                if rank == 0:
                    said["weights"] = digest(weights)
                file.write(json.dumps(said) + "\n")
                file.flush()
                on_step(step)
                accelerator.save_state(background=step % 3 == 0)
                if step == steps:
                    break
    accelerator.end_training()


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Equal for weights that are the same bit by bit."""
    return xxhash.xxh3_64_hexdigest(b"".join(bytes(weights[name].numpy().data) for name in sorted(weights)))


def fork_ranks(world_size: int, work: Callable[[int], None], log: Path) -> list[int]:
    """Start the ranks of a run; the process id of each."""
    port = free_port()
    pids: list[int] = []
    for rank in range(world_size):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        torch.set_num_threads(
            1
        )  # before a second thread does: of two at once after a fork, torch loses its pool
        try:
            output = os.open(log.with_suffix(f".{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if world_size > 1:
                os.environ.update(rank_environment(rank, world_size, port, {}))
            work(rank)
            code = 0
        except (OSError, OtherRankFailedError, CheckpointLockedError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            code = 3
        except BaseException:  # noqa: BLE001 - whatever it is, a forked process ends here
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pids


def wait_for(pids: Sequence[int], *, within_seconds: float = 60) -> list[int]:
    """The exit codes; negative for the signal that ended one."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + within_seconds
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        assert time.monotonic() < deadline, f"processes {set(pids) - set(codes)} hang"
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


class Drill:
    """The rounds of one fault.

    Args:
        world_size: Ranks of the run.
        directory: An empty folder.
        seed: Of all that is left to chance.
        backend: What the run trains by.
    """

    def __init__(self, world_size: int, directory: Path, seed: int, backend: str = "usual") -> None:
        self.world_size = world_size
        self.backend = backend
        self.root = directory
        self.run = directory / "run"
        self.chance = random.Random(seed)
        self.faults = 0
        self.trained = 0
        self.expected = self._unbroken()

    @property
    def checkpoints(self) -> Path:
        """Where the run saves."""
        return self.run / "checkpoints"

    def _unbroken(self) -> dict[tuple[int, int], dict[str, Any]]:
        log = self.root / "unbroken"
        work = self.work(log, directory=self.root / "unbroken-run")
        assert wait_for(fork_ranks(self.world_size, work, log)) == [0] * self.world_size, output_of(log)
        return {(said["step"], said["rank"]): said for said in self.logged(log)}

    def work(
        self,
        log: Path,
        *,
        directory: Path | None = None,
        on_step: Callable[[int, int], None] = lambda *_: None,
    ) -> Callable[[int], None]:
        """What a rank does."""
        where = directory or self.run
        return lambda rank: train(
            where,
            rank,
            log.with_suffix(f".{rank}"),
            backend=self.backend,
            on_step=lambda step: on_step(rank, step),
        )

    def logged(self, log: Path) -> Iterator[dict[str, Any]]:
        """What the ranks have logged, but for a line that a kill cut off."""
        for rank in range(self.world_size):
            file = log.with_suffix(f".{rank}")
            lines = file.read_text().splitlines(keepends=True) if file.exists() else []
            yield from (json.loads(line) for line in lines if line.endswith("\n"))

    def rounds(self, number: int, fault: Callable[["Drill", Path], None], *, damages: bool) -> None:
        """Play rounds of a fault. One that damages nothing must leave the newest checkpoint, or a newer one."""
        for index in range(number):
            log = self.root / f"round-{index}"
            newest = self.newest()
            if newest is not None and newest.step >= STEPS - 3:
                shutil.rmtree(self.run)
                newest = None
            fault(self, log)
            steps = [said["step"] for said in self.logged(log)]
            self.trained += bool(steps)
            for said in self.logged(log):
                assert said == self.expected[said["step"], said["rank"]], (index, said)
            if steps:
                assert min(steps) == (1 if newest is None else newest.step + 1), (index, min(steps), newest)
            after = self.newest()
            assert damages or newest is None or (after is not None and after.step >= newest.step), index
            assert (
                after is None
                or digest(dict(after.models["model"])) == self.expected[after.step, 0]["weights"]
            )

    def newest(self) -> Any:
        """What loads now; None if nothing is good.

        One process does not read what other ranks have of their own: here every byte of every file is.
        """
        context = Context(topology=Topology(), device=torch.device("cpu"))
        good = (one.folder for one in find_checkpoints(self.checkpoints) if one.is_valid and is_whole(one))
        newest = next(good, None)
        return None if newest is None else Checkpointer(context, self.checkpoints).load(newest)

    def play(self, log: Path, *, victims: int = 0, after_lines: int = 0) -> list[int]:
        """Let the run go on; when it has logged some lines, if it comes to that, kill some of its ranks."""
        pids = fork_ranks(self.world_size, self.work(log), log)
        if not victims:
            return wait_for(pids)
        deadline = time.monotonic() + 60
        while sum(1 for _ in self.logged(log)) < after_lines and not any(map(has_ended, pids)):
            assert time.monotonic() < deadline, output_of(log)
            time.sleep(0.002)
        time.sleep(self.chance.uniform(0, LONGEST_SECONDS))
        for pid in self.chance.sample(pids, victims):
            os.kill(pid, signal.SIGKILL)
        if victims < len(pids):  # what the launcher does
            time.sleep(0.05)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        return wait_for(pids)


def has_ended(pid: int) -> bool:
    """Whether a process has, which is still to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def is_whole(found: CheckpointInfo) -> bool:
    """Whether every block of every file is as it was written."""
    assert found.manifest is not None
    try:
        for name, record in found.manifest.files.items():
            with HashedReader(found.folder / name, record) as reader:
                reader.read_all()
    except CorruptCheckpointError:
        return False
    return True


def output_of(log: Path) -> str:
    """What the ranks of a round printed."""
    return "\n".join(path.read_text() for path in sorted(log.parent.glob(f"{log.name}.*.txt")))


def kill(drill: Drill, log: Path) -> None:
    """kill -9 of one rank or of all, at a random moment."""
    victims = drill.chance.randint(1, drill.world_size)
    codes = drill.play(log, victims=victims, after_lines=drill.chance.randint(1, 12 * drill.world_size))
    assert set(codes) <= {0, 1, 3, -signal.SIGKILL}, output_of(log)
    drill.faults += -signal.SIGKILL in codes


def damage(drill: Drill, log: Path, hurt: Callable[[Path, random.Random], None]) -> None:
    """Some steps; then a random file of the newest checkpoint, or of the one before it, is hurt."""
    last = drill.chance.randint(1, 3)

    def stop(_: int, step: int) -> None:
        nonlocal last
        last -= 1
        if last < 0:
            raise OSError("enough for this round")

    codes = wait_for(fork_ranks(drill.world_size, drill.work(log, on_step=stop), log))
    assert set(codes) <= {0, 3}, output_of(log)
    found = [one for one in find_checkpoints(drill.checkpoints) if one.is_valid]
    if found:
        chosen = drill.chance.choice(found[:2])
        hurt(drill.chance.choice(sorted(chosen.folder.iterdir())), drill.chance)
        with_problem = [one.folder for one in find_checkpoints(drill.checkpoints)]
        assert chosen.folder in with_problem
        drill.faults += 1
        assert (now := drill.newest()) is None or now.path != chosen.folder


def flip(path: Path, chance: random.Random) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut_or_delete(path: Path, chance: random.Random) -> None:
    """Leave the beginning of a file, or nothing of it."""
    if chance.random() < 0.5:
        path.unlink()
    else:
        os.truncate(path, chance.randrange(path.stat().st_size))


def fail_midway(drill: Drill, log: Path) -> None:
    """A random rank raises at a random byte of a save."""
    victim, at = drill.chance.randrange(drill.world_size), drill.chance.randrange(600_000)
    write = HashedWriter.write
    left = at

    def failing(writer: HashedWriter, data: Any) -> None:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError("the disk of this rank is gone")
        write(writer, data)

    def work(rank: int) -> None:
        if rank == victim:
            HashedWriter.write = failing
        train(drill.run, rank, log.with_suffix(f".{rank}"), backend=drill.backend)

    codes = wait_for(fork_ranks(drill.world_size, work, log))
    assert set(codes) <= {0, 3}, output_of(log)
    drill.faults += 3 in codes


def fill_up(drill: Drill, log: Path) -> None:
    """The disk is full at a random byte."""
    free = os.statvfs(drill.run.parent).f_bavail * os.statvfs(drill.run.parent).f_frsize
    ballast = drill.run.parent / "ballast"
    ballast.write_bytes(bytes(max(0, free - drill.chance.randrange(1_500_000))))
    codes = drill.play(log)
    assert set(codes) <= {0, 3}, output_of(log)
    drill.faults += 3 in codes
    ballast.unlink()


def write_twice(drill: Drill, log: Path) -> None:
    """A second run saves into the folder of one that is saving, and may be killed at a random moment."""
    writer_lock._PATIENCE_SECONDS = 0.0
    second = log.with_name(f"{log.name}-second")

    def wait_until_the_first_has_saved() -> None:
        while len(list(drill.logged(log))) <= drill.world_size:
            time.sleep(0.005)

    def work(rank: int) -> None:
        train(
            drill.run,
            rank,
            second.with_suffix(f".{rank}"),
            backend=drill.backend,
            before_load=wait_until_the_first_has_saved,
        )

    others = fork_ranks(drill.world_size, work, second)
    pids = fork_ranks(drill.world_size, drill.work(log, on_step=lambda *_: time.sleep(0.02)), log)
    wait_until_the_first_has_saved()
    time.sleep(drill.chance.uniform(0, 3 * LONGEST_SECONDS))
    for pid in pids if drill.chance.random() < 0.5 else ():
        os.kill(pid, signal.SIGKILL)
    codes = wait_for([*pids, *others])
    assert set(codes) <= {0, 1, 3, -signal.SIGKILL}, output_of(log)
    drill.faults += "CheckpointLockedError" in output_of(second)
    for said in drill.logged(second):
        assert said == drill.expected[said["step"], said["rank"]]


FAULTS: dict[str, Callable[[Drill, Path], None]] = {
    "kill": kill,
    "flip": lambda drill, log: damage(drill, log, flip),
    "cut": lambda drill, log: damage(drill, log, cut_or_delete),
    "raise": fail_midway,
    "full": fill_up,
    "twice": write_twice,
}


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A disk of a few megabytes in memory."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def get_ready(more_imports: Sequence[str] = ()) -> None:
    """Import what the rounds need. A rank has one thread, and writes pieces of which its small files have several."""
    torch.set_num_threads(1)
    disk_writer.BUFFER_BYTES = 2**15
    for name in (*IMPORTS, *more_imports):
        import_module(name)


def main(fault: str, rounds: int, world_size: int, directory: Path, seed: int, backend: str) -> None:
    """Play the rounds, and say how many of them met the fault, and in how many a step was made."""
    get_ready(["drivetrain_backends.fsdp.backend"] if backend == "fsdp" else [])
    drill = Drill(world_size, directory, seed, backend)
    with small_disk(directory / "disk") if fault == "full" else nullcontext(directory) as disk:
        drill.run = disk / "run"
        drill.rounds(rounds, FAULTS[fault], damages=fault in ("flip", "cut"))
    print(json.dumps({"rounds": rounds, "faults": drill.faults, "trained": drill.trained}))


if __name__ == "__main__":
    fault, rounds, world_size, directory, seed, *backend = sys.argv[1:]
    main(fault, int(rounds), int(world_size), Path(directory), int(seed), *backend or ["usual"])
