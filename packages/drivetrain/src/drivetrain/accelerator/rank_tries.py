"""Tries of a training function on all ranks together: if one rank runs out of memory, the try ends on all."""

import threading
from collections.abc import Callable
from time import monotonic

from drivetrain_memory import TryOutcome
from drivetrain_state import Context, GroupRenewal, OtherRankFailedError
from drivetrain_state.store_rounds import StoreRounds, wait

_POLL_SECONDS = 0.1
_SEVER_SECONDS = 30.0


class RankTries:
    """The agreement of all ranks on the outcome of each try. Constructed and called on all ranks.

    If a rank runs out of memory inside a step, the other ranks wait in a collective. A thread of each rank learns of
    the failure through the store, and closes the connections between the ranks so that the collective fails. Then the
    ranks form their group again. This works over gloo. NCCL's collectives ignore closed connections: NCCL's timeout
    ends the try.

    Args:
        context: The context of this process, of several ranks.
        release: A function that frees what the try has prepared, before the group is formed again.
    """

    def __init__(self, context: Context, release: Callable[[], object]) -> None:
        self._context = context
        self._release = release
        self._renewal = GroupRenewal(context)
        self._rounds = self._renewal.rounds()
        self._number = 0
        self._watch = _Watch(self._renewal, self._number)

    def agree(self, outcome: TryOutcome) -> TryOutcome:
        """Return the outcome of a try on all ranks, and prepare the next try.

        Raises:
            OtherRankFailedError: The try failed on another rank, for another reason than memory.
            TimeoutError: A rank has not ended its try within the state section's timeout.
        """
        topology = self._context.topology
        if outcome is TryOutcome.FAILED and self._out_of_memory():
            # Another rank ran out first, and this one's collective failed when the connections closed.
            outcome = TryOutcome.OUT_OF_MEMORY
        if outcome is TryOutcome.OUT_OF_MEMORY:
            # Before the outcome: a rank that has read all outcomes then sees the count too.
            self._rounds.count(f"short/{self._number}", add=1)
        self._rounds.post(f"outcome/{self._number}/{topology.rank}", outcome.value)
        if outcome is TryOutcome.FAILED:
            self._watch.stop()
            return outcome
        outcomes = [self._outcome_of(rank) for rank in range(topology.world_size)]
        self._watch.stop()
        if self._out_of_memory():
            self._release()
            self._renewal.renew()
            self._number += 1
            self._watch = _Watch(self._renewal, self._number)
            return TryOutcome.OUT_OF_MEMORY
        if TryOutcome.FAILED in outcomes:
            raise OtherRankFailedError(
                f"the try failed on rank {outcomes.index(TryOutcome.FAILED)}; see its output"
            )
        return TryOutcome.FITS

    def close(self) -> None:
        """End the thread of a try that ended without a call of `agree`."""
        self._watch.stop()

    def _out_of_memory(self) -> bool:
        return self._rounds.count(f"short/{self._number}") > 0

    def _outcome_of(self, rank: int) -> TryOutcome:
        deadline = monotonic() + self._context.settings.timeout_seconds
        key = f"outcome/{self._number}/{rank}"
        value = wait(lambda: self._rounds.read(key), while_=lambda: monotonic() < deadline)
        if value is None:
            raise TimeoutError(
                f"rank {rank} has not ended its try within {self._context.settings.timeout_seconds:.0f} s of this "
                "rank: it is slower, or its process has ended; raise state.timeout_seconds, or look at its output"
            )
        return TryOutcome(value)


class _Watch:
    """A thread that closes the connections between the ranks once one of them is out of memory in a try."""

    def __init__(self, renewal: GroupRenewal, number: int) -> None:
        self._renewal = renewal
        self._rounds: StoreRounds = renewal.rounds()
        self._number = number
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drivetrain-tries", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. If a rank is out of memory, first wait until the connections are closed."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            # Read before the count: a try that ends meanwhile is looked at once more.
            ended = self._ended.wait(_POLL_SECONDS)
            if self._rounds.count(f"short/{self._number}") > 0:
                self._renewal.sever(self._rounds, timeout_seconds=_SEVER_SECONDS)
                return
            if ended:
                return
