"""Gather the outcomes of a save among the ranks' writing threads, through the store and without the process group."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import DistError, PrefixStore, Store

from drivetrain_checkpoint.errors import OtherRankFailedError
from drivetrain_state import Topology
from drivetrain_state.collectives.collective_errors import Outcome
from drivetrain_state.process_identity import has_ended, process_identity
from drivetrain_state.store_rounds import StoreRounds, wait

_FAREWELL_SECONDS = 30.0
_LOOK_SECONDS = 1.0  # between two looks at the processes of other ranks


class StoreGather:
    """The part of this rank in the exchange about one save; each `gather` is a round. Used by one thread only.

    Args:
        store: A connection to the store, used by this thread alone.
        save_id: The id of the save, which keeps the keys of different saves apart.
        stall_seconds: The time without progress on any rank, in seconds, after which a `gather` fails. A rank of this
            host whose process has ended is noticed at once.

    Raises:
        OtherRankFailedError: From `gather`: a rank has not answered or has ended, or the store is gone.
    """

    def __init__(self, store: Store, save_id: str, *, topology: Topology, stall_seconds: float) -> None:
        self._rounds = StoreRounds(PrefixStore(save_id, store), rank=topology.rank)
        self._ranks = range(topology.world_size)
        self._others = range(1, topology.world_size)
        self._stall_seconds = stall_seconds
        self._number = 0
        self._is_concluded = False  # whether the others read a conclusion of this rank
        # Before this rank writes, and may be killed.
        self._rounds.post(f"process/{topology.rank}", process_identity())

    def progress(self) -> None:
        """Signal that this rank makes progress."""
        self._rounds.count("progress", add=1)

    def gather(self, outcome: Outcome) -> list[Outcome]:
        """Return the outcomes of all ranks, in order. On ranks other than 0, all values but rank 0's are None."""
        self._number += 1
        self._is_concluded = False
        number, rounds = self._number, self._rounds
        try:
            if rounds.rank == 0:
                others = [self._wait(partial(rounds.answer_of, number, rank), rank) for rank in self._others]
                self._is_concluded = True
                rounds.conclude(number, [outcome, *((None, told) for _, told in others)])
                return [outcome, *others]
            rounds.answer(number, outcome)
            outcomes = self._wait(partial(rounds.conclusion, number), 0)
            rounds.count(f"heard/{number}", add=1)
            return outcomes
        except (DistError, OSError) as error:
            raise OtherRankFailedError(
                "the save was given up: the process that hosts the ranks' store has ended, or cannot be reached"
            ) from error

    def close(self) -> None:
        """Delete the keys. Rank 0, which may host the store, waits first until all have read the last conclusion.

        Errors of the store are ignored: the outcome of the save is already known.
        """
        if not self._is_concluded:
            return
        last, end = f"heard/{self._number}", time.monotonic() + _FAREWELL_SECONDS
        try:
            wait(
                lambda: self._rounds.count(last) >= len(self._others) or None,
                while_=lambda: time.monotonic() < end,
            )
            for number in range(1, self._number + 1):
                self._rounds.forget(number, self._others)
                self._rounds.delete(f"heard/{number}")
            self._rounds.delete("progress", *(f"process/{rank}" for rank in self._ranks))
        except (DistError, OSError):
            return

    def _wait(self, read: Callable[[], Any], rank: int) -> Any:
        """Wait for a value that a rank publishes, as long as any rank makes progress."""
        seen, since = self._rounds.count("progress"), time.monotonic()
        ended, looked = None, since

        def goes_on() -> bool:
            nonlocal seen, since, ended, looked
            now = time.monotonic()
            if (now_seen := self._rounds.count("progress")) != seen:
                seen, since = now_seen, now
            if now - looked >= _LOOK_SECONDS:
                ended, looked = self._ended(), now
            return ended is None and now - since <= self._stall_seconds

        value = wait(read, while_=goes_on)
        if value is not None:
            return value
        why = (
            f"rank {rank} has not answered, and no rank has written anything for {self._stall_seconds:g} s; rank "
            f"{rank} may have died, or its disk hangs (if it is only slow, raise checkpoint.stall_seconds)"
        )
        if ended is not None:
            why = f"the process of rank {ended} has ended before its part was done"
        hint = "" if rank else "; rank 0 commits: the newest checkpoint tells whether it has"
        raise OtherRankFailedError(f"the save was given up: {why}{hint}")

    def _ended(self) -> int | None:
        """Return a rank whose process ended before it answered or concluded; None if all such processes run."""
        for rank in self._ranks:
            identity = self._rounds.read(f"process/{rank}")
            if identity is None or not has_ended(identity):
                continue
            if rank == 0 or self._rounds.answer_of(self._number, rank) is None:
                return rank
        return None
