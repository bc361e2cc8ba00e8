"""Gather the outcomes of a save among the ranks' writing threads, through the store and without the process group."""

import json
import time
from typing import cast

from torch.distributed import DistError, PrefixStore, Store

from drivetrain_checkpoint.coordination.collective_errors import Outcome
from drivetrain_checkpoint.errors import OtherRankFailedError

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.2
_FAREWELL_SECONDS = 30.0


class StoreTalk:
    """A rank's end of the exchange about one save. Used by one thread only.

    Args:
        store: A connection to the store, used by this thread alone.
        save_id: The id of the save, which keeps the keys of different saves apart.
        rank: The rank of this process.
        world_size: The number of ranks.
        stall_seconds: The time without progress on any rank, in seconds, after which a `gather` fails.

    Raises:
        OtherRankFailedError: From `gather`: a rank has not answered, or the store is gone.
    """

    def __init__(
        self, store: Store, save_id: str, *, rank: int, world_size: int, stall_seconds: float
    ) -> None:
        self._store = PrefixStore(save_id, store)
        self._rank = rank
        self._world_size = world_size
        self._stall_seconds = stall_seconds
        self._round = 0
        self._is_answered = False  # whether all ranks have answered in the last round

    def progress(self) -> None:
        """Signal that this rank makes progress."""
        self._store.add("progress", 1)

    def gather(self, outcome: Outcome) -> list[Outcome]:
        """Gather the outcomes of an action on all ranks.

        Args:
            outcome: The outcome on this rank; JSON must be able to hold its value.

        Returns:
            The outcomes of all ranks, in rank order; on ranks other than 0, errors only, with None for the values.
        """
        try:
            return self._gather(outcome)
        except DistError as error:
            raise OtherRankFailedError(
                "the save was given up: the process that hosts the ranks' store has ended, or cannot be reached"
            ) from error

    def _gather(self, outcome: Outcome) -> list[Outcome]:
        self._round += 1
        self._is_answered = False
        if self._rank:
            self._store.set(f"{self._round}/{self._rank}", json.dumps(outcome))
            outcomes = cast("list[Outcome]", self._wait(f"{self._round}/all", 0))
            self._store.add(f"{self._round}/heard", 1)
            return outcomes
        others = [self._wait(f"{self._round}/{rank}", rank) for rank in range(1, self._world_size)]
        outcomes = [outcome, *cast("list[Outcome]", others)]
        self._is_answered = True
        self._store.set(f"{self._round}/all", json.dumps([(None, told) for _, told in outcomes]))
        return outcomes

    def close(self) -> None:
        """Wait on rank 0, which may host the store, until the others have read the last answer; delete the keys.

        Errors of the store are ignored: the outcome of the save is already known.
        """
        if self._rank or not self._is_answered:
            return
        try:
            self._await_farewell()
            for number in range(1, self._round + 1):
                for key in ("all", "heard", *map(str, range(1, self._world_size))):
                    self._store.delete_key(f"{number}/{key}")
            self._store.delete_key("progress")
        except DistError:
            return

    def _await_farewell(self) -> None:
        end = time.monotonic() + _FAREWELL_SECONDS
        pause = _FIRST_PAUSE_SECONDS
        while self._store.add(f"{self._round}/heard", 0) < self._world_size - 1 and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _wait(self, key: str, rank: int) -> object:
        """Wait for the value that a rank sets under a key, as long as any rank makes progress."""
        seen, since = self._store.add("progress", 0), time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        while not self._store.check([key]):
            if (now_seen := self._store.add("progress", 0)) != seen:
                seen, since = now_seen, time.monotonic()
            if time.monotonic() - since > self._stall_seconds:
                raise OtherRankFailedError(
                    f"the save was given up: rank {rank} has not answered, and no rank has written anything for "
                    f"{self._stall_seconds:g} s; rank {rank} may have died, or its disk hangs (if it is only slow, "
                    "raise checkpoint.stall_seconds)"
                    + ("" if rank else "; rank 0 commits: the newest checkpoint tells whether it has")
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return json.loads(self._store.get(key))
