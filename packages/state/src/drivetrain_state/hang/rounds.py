"""The exchange about a hang through keys of a store; each rank uses its own client.

A round is one question to all ranks, numbered from 1. Each value is written by one rank and read by the others. No
call waits for a rank. Ranks exchange durations only, so that the clocks of their hosts need not agree. A write may
become visible to other ranks a moment later.
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
    """The reporting rank's diagnosis, as published to all ranks.

    Attributes:
        text: The diagnosis as text.
        blocked: Whether some rank is stuck waiting for another.
        witness: The rank whose progress means that the run has resumed.
        stacks: The path of the file with the full stacks; empty if it could not be written.
    """

    text: str
    blocked: bool
    witness: int
    stacks: str


class HangRounds:
    """A client of one rank for the rounds in the store. Not thread-safe.

    Raises:
        ConnectionError: If the store is gone. Every method may raise this, or `torch.distributed.DistError`.
    """

    def __init__(self, store: Store, *, rank: int) -> None:
        client = store.clone()  # a separate connection: a main thread that waits on `store` holds its lock
        self._store = PrefixStore(_PREFIX, client)
        self._probe = StoreProbe(store)
        self._rank = rank
        self._store.set(f"presence/{rank}", _HERE)

    def newest(self) -> int:
        """Return the number of the newest round, 0 for none. Ranks poll this between rounds."""
        self._probe.check()
        return self._store.add("rounds", 0)

    def ask(self, after: int) -> None:
        """Ask every rank for its position, unless another rank has asked since round `after`."""
        if self._store.add(f"asked/{after + 1}", 1) == 1:
            self._store.add("rounds", 1)

    def answer(self, number: int, answer: Answer) -> None:
        """Publish this rank's answer to a round, and delete its answer to the previous one."""
        self._store.set(f"answer/{number}/{self._rank}", answer.to_json())
        self._store.delete_key(f"answer/{number - 1}/{self._rank}")

    def has_answered(self, number: int, rank: int) -> bool:
        """Return whether `rank` has answered round `number`."""
        return self._store.check([f"answer/{number}/{rank}"])

    def answers(self, number: int, ranks: Iterable[int]) -> dict[int, Answer]:
        """Return the answers to round `number` of those `ranks` that have answered."""
        found = [rank for rank in ranks if self.has_answered(number, rank)]
        return {rank: Answer.from_json(self._store.get(f"answer/{number}/{rank}")) for rank in found}

    def depart(self, ending: str) -> None:
        """Publish how this rank ended, to explain its later silence."""
        self._probe.check()
        self._store.set(f"presence/{self._rank}", ending)

    def departures(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return how those `ranks` ended that called `depart`."""
        present = {rank: self._read(f"presence/{rank}") or _HERE for rank in ranks}
        return {rank: ending for rank, ending in present.items() if ending != _HERE}

    def claim_report(self, number: int) -> bool:
        """Claim the report on a round; return whether this rank is the first to do so."""
        return self._store.add(f"report/{number}", 1) == 1

    def conclude(self, number: int, verdict: Verdict) -> None:
        """Publish the verdict on a round."""
        self._store.set(f"verdict/{number}", json.dumps(asdict(verdict)))

    def verdict(self, number: int) -> Verdict | None:
        """Return the verdict on a round, or None before it is published."""
        text = self._read(f"verdict/{number}")
        return None if text is None else Verdict(**json.loads(text))

    def resume(self, number: int, text: str) -> None:
        """Publish that the run has resumed."""
        self._store.set(f"resumed/{number}", text)

    def resumed(self, number: int) -> str | None:
        """Return how the run resumed after a round, or None before it does."""
        return self._read(f"resumed/{number}")

    def close(self) -> None:
        """Close the connection of the probe."""
        self._probe.close()

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
