"""Training that is killed and goes on with another number of ranks: every sample of an epoch once, in the one order.

    python resized_drill.py ROUNDS DIRECTORY SEED

Rounds have one rank, two, three, and one again; each goes on at the newest checkpoint, and is killed around one of
its next steps. Those that led to the newest checkpoint must have read what a run of one rank reads, in its order,
each as much of it as its ranks take; and the checkpoint must hold the weights that were logged at its step.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from drill import STEPS, Drill, Samples, digest, fork_ranks, get_ready, output_of, train, wait_for

BATCH = 3  # samples of a rank's step, as drill.train has it
EPOCH = len(Samples())


class ResizedDrill(Drill):
    """A drill whose rounds have one rank to three.

    Args:
        directory: An empty folder.
        seed: Of all that is left to chance.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(1, directory, seed)
        self.order = self._order()
        # Of each step since the beginning, what its ranks logged.
        self.history: dict[int, list[dict[str, Any]]] = {}
        self.resized = 0

    def _order(self) -> list[int]:
        """The samples that one rank reads, over more epochs than a run of three ranks has."""
        log = self.root / "order"
        steps = 3 * STEPS + EPOCH // BATCH

        def work(rank: int) -> None:
            train(self.root / "order-run", rank, log.with_suffix(f".{rank}"), steps=steps)

        assert wait_for(fork_ranks(1, work, log)) == [0], output_of(log)
        return [sample for said in self.logged(log) for sample in said["samples"]]

    def play_rounds(self, number: int) -> None:
        """Play rounds, each from the newest checkpoint on."""
        for index in range(number):
            newest = self.newest()
            if newest is not None and newest.step >= STEPS - 3:
                shutil.rmtree(self.run)
                self.history.clear()
                newest = None
            before, self.world_size = self.world_size, 1 + index % 3
            self.resized += newest is not None and before != self.world_size
            self.history = {
                step: said for step, said in self.history.items() if newest and step <= newest.step
            }
            log = self.root / f"round-{index}"
            lines_left = self.world_size * (STEPS - (0 if newest is None else newest.step))
            self.play_and_kill(log, after_lines=min(self.chance.randint(1, 8), lines_left))
            for said in self.logged(log):
                self.history.setdefault(said["step"], []).append(said)
            self.check(at_least=0 if newest is None else newest.step)

    def play_and_kill(self, log: Path, *, after_lines: int) -> None:
        """Let the run go on until it has logged some lines, and kill all of its ranks a moment later."""
        pids = fork_ranks(self.world_size, self.work(log), log)
        deadline = time.monotonic() + 60
        while len(list(self.logged(log))) < after_lines:
            assert time.monotonic() < deadline, output_of(log)
            time.sleep(0.002)
        time.sleep(self.chance.uniform(0, 0.05))
        for pid in pids:  # at once: one that runs on would notice the end of another, and end by itself
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        codes = wait_for(pids)
        assert set(codes) <= {0, -signal.SIGKILL}, output_of(log)
        self.faults += -signal.SIGKILL in codes

    def check(self, *, at_least: int) -> None:
        """Hold the steps that led to the newest checkpoint against the one order."""
        newest = self.newest()
        assert at_least <= (0 if newest is None else newest.step)
        if newest is None:
            return
        at = 0
        for step in range(1, newest.step + 1):
            ranks = self.history[step]
            left = EPOCH - at % EPOCH
            wanted = self.order[at : at + min(BATCH * len(ranks), left)]
            read = [sample for said in ranks for sample in said["samples"]]
            assert sorted(set(read)) == sorted(wanted) or (
                left < BATCH * len(ranks) and set(wanted) <= set(read)  # the tail of an epoch is filled up
            ), (step, read, wanted)
            at += len(wanted)
        (weights,) = (said["weights"] for said in self.history[newest.step] if said["rank"] == 0)
        assert digest(dict(newest.models["model"])) == weights


def main(rounds: int, directory: Path, seed: int) -> None:
    """Play the rounds, and say how many were killed, and how many went on with another number of ranks."""
    get_ready()
    drill = ResizedDrill(directory, seed)
    drill.play_rounds(rounds)
    print(json.dumps({"rounds": rounds, "faults": drill.faults, "resized": drill.resized}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
