"""The questions and answers about a hang, as keys of a store; one client of its own for each rank.

A round is one question to all ranks, numbered from 1. Every value is written by one rank and read by the others:
nothing here waits for a rank, and only ages travel, so that the clocks of the hosts need not agree. A store may show
a write to the others a moment later.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from torch.distributed import PrefixStore, Store

from drivetrain_state.hang.report import Answer
from drivetrain_state.store_probe import StoreProbe

_PREFIX = "drivetrain_watchdog"
_HERE = "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the reporting rank found, for every rank to know.

    Attributes:
        text: The diagnosis in words.
        blocked: Whether some rank is stuck waiting for another.
        witness: The rank whose progress means that the run goes on.
        stacks: Where the full stacks are; empty where they could not be written.
    """

    text: str
    blocked: bool
    witness: int
    stacks: str


class HangRounds:
    """One rank's end of the line. Used by one thread at a time.

    Raises:
        ConnectionError: Or `torch.distributed.DistError`, from every method, once the store is gone.
    """

    def __init__(self, store: Store, *, rank: int) -> None:
        client = store.clone()  # a connection of its own: a main thread that waits on `store` holds its lock
        self._store = PrefixStore(_PREFIX, client)
        self._probe = StoreProbe(store)
        self._rank = rank
        self._store.set(f"presence/{rank}", _HERE)

    def newest(self) -> int:
        """The number of the last question asked, 0 for none: the one thing that is polled."""
        self._probe.check()
        return self._store.add("rounds", 0)

    def ask(self, after: int) -> None:
        """Ask every rank where it is, unless another rank has asked since round `after`."""
        if self._store.add(f"asked/{after + 1}", 1) == 1:
            self._store.add("rounds", 1)

    def answer(self, number: int, answer: Answer) -> None:
        """Say where this rank is; its answer to the question before is forgotten."""
        self._store.set(f"answer/{number}/{self._rank}", answer.to_json())
        self._store.delete_key(f"answer/{number - 1}/{self._rank}")

    def has_answered(self, number: int, rank: int) -> bool:
        """Whether a rank has answered."""
        return self._store.check([f"answer/{number}/{rank}"])

    def answers(self, number: int, ranks: Iterable[int]) -> dict[int, Answer]:
        """The answers of those of `ranks` that have answered."""
        found = [rank for rank in ranks if self.has_answered(number, rank)]
        return {rank: Answer.from_json(self._store.get(f"answer/{number}/{rank}")) for rank in found}

    def depart(self, ending: str) -> None:
        """Say how this rank ended, so that its silence from now on is understood."""
        self._probe.check()
        self._store.set(f"presence/{self._rank}", ending)

    def departures(self, ranks: Iterable[int]) -> dict[int, str]:
        """How those of `ranks` ended that said goodbye."""
        present = {rank: self._read(f"presence/{rank}") or _HERE for rank in ranks}
        return {rank: ending for rank, ending in present.items() if ending != _HERE}

    def claim_report(self, number: int) -> bool:
        """Whether this rank is the first to report on a round."""
        return self._store.add(f"report/{number}", 1) == 1

    def conclude(self, number: int, verdict: Verdict) -> None:
        """Tell every rank what was found."""
        self._store.set(f"verdict/{number}", json.dumps(asdict(verdict)))

    def verdict(self, number: int) -> Verdict | None:
        """What was found, once it was."""
        text = self._read(f"verdict/{number}")
        return None if text is None else Verdict(**json.loads(text))

    def resume(self, number: int, text: str) -> None:
        """Tell every rank that the run goes on."""
        self._store.set(f"resumed/{number}", text)

    def resumed(self, number: int) -> str | None:
        """How the run went on, once it did."""
        return self._read(f"resumed/{number}")

    def close(self) -> None:
        """Hang up."""
        self._probe.close()

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
