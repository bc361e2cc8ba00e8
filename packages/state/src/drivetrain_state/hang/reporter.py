"""The questions, answers and reports that ranks exchange about a hang through the shared store."""

import os
import socket
import threading
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from time import monotonic

from torch.distributed import DistError

from drivetrain_messages import say
from drivetrain_state.hang.monitor import HangMonitor
from drivetrain_state.hang.report import Answer, Verdict, diagnose, hang_table, stacks_text
from drivetrain_state.hang.stack import find_place, stack_text, thread_frames
from drivetrain_state.store_rounds import StoreRounds


@dataclass(slots=True, kw_only=True)
class _Round:
    """The state of the newest round, as one rank knows it."""

    number: int
    seen_at: float = field(default_factory=monotonic)
    num_changes: int = 0
    answers: dict[int, Answer] = field(default_factory=dict[int, Answer])
    verdict: Verdict | None = None
    reported_here: bool = False
    over: bool = False


class HangReporter(threading.Thread):
    """A thread that asks, answers and reports about hangs; all use of the store goes through it."""

    def __init__(self, monitor: HangMonitor, rounds: StoreRounds, *, directory: Path) -> None:
        super().__init__(name="drivetrain-hang-reporter", daemon=True)
        self._monitor = monitor
        self._rounds = rounds
        self._directory = directory
        self._round = _Round(number=rounds.newest(), over=True)
        rounds.arrive()
        self._false_alarms = 0
        self._num_futile_rounds = 0  # since this rank's last progress
        self._num_changes = 0
        self._quiet_until = 0.0

    def run(self) -> None:
        """Poll the store until the monitor stops or the store is gone."""
        try:
            while not self._monitor.stopping.wait(self._monitor.poll_seconds):
                self._turn()
                self._monitor.heard_at = monotonic()
            # In a last turn, this rank still answers and reports its latest progress before it departs.
            self._monitor.timer.look()
            self._turn()
            self._rounds.depart(self._monitor.ending)
        except (DistError, OSError):
            # The store's host is gone, often because it has just finished: the monitor decides.
            self._monitor.heard_at = float("-inf")
        self._rounds.close()

    def _turn(self) -> None:
        newest = self._rounds.newest()
        if newest > self._round.number:
            self._answer(newest)
        elif self._may_ask():
            self._rounds.ask(newest)
        if not self._round.over:
            self._follow(self._round)

    def _may_ask(self) -> bool:
        """Return whether this rank may ask: it is idle long enough, and the last question was long ago."""
        timer, settings = self._monitor.timer, self._monitor.settings
        if timer.num_changes != self._num_changes:
            self._num_changes, self._num_futile_rounds, self._quiet_until = timer.num_changes, 0, 0.0
        hang = settings.hang_timeout_seconds
        # Wait longer after each false alarm, but never so long that the process ends without a report.
        patience = min(hang * (1 + self._false_alarms), max(hang, settings.timeout_seconds / 2))
        if self._monitor.will_end and timer.idle_seconds > 0.9 * settings.timeout_seconds:
            # Other ranks are ending because of the same hang, and a new report would accuse them.
            return False
        return timer.idle_seconds > patience and monotonic() >= self._quiet_until

    def _answer(self, number: int) -> None:
        timer = self._monitor.timer
        frames = thread_frames(timer.latest.thread_id)
        place = find_place(frames)
        answer = Answer(
            rank=self._rounds.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            idle_seconds=timer.idle_seconds,
            label=timer.latest.label,
            recent=", ".join(timer.latest.recent.copy()),
            where=place.where,
            call=place.call,
            waits=place.waits_for != "nothing",
            stuck=self._monitor.stuck(place),
            stack=stack_text(frames),
        )
        self._rounds.answer(number, asdict(answer))
        self._round = _Round(number=number, num_changes=timer.num_changes)
        self._num_futile_rounds += 1
        hang = self._monitor.settings.hang_timeout_seconds
        self._quiet_until = monotonic() + hang * 2**self._num_futile_rounds

    def _follow(self, current: _Round) -> None:
        """Report if this rank is the reporter, read the verdict, and detect that the run resumes."""
        if current.verdict is None:
            if self._is_reporter(current):
                self._collect(current)
            if (verdict := self._rounds.conclusion(current.number)) is not None:
                current.verdict = Verdict(**verdict)
                self._monitor.learn(current.verdict)
            return
        timer, rank, resumed = self._monitor.timer, self._rounds.rank, f"resumed/{current.number}"
        if current.verdict.witness == rank and timer.num_changes != current.num_changes:
            self._rounds.post(resumed, f"rank {rank} went on with: {timer.latest.label}")
        if (text := self._rounds.read(resumed)) is not None:
            current.over = True
            self._monitor.learn(None)
            self._false_alarms += 1
            if current.reported_here:
                waited = monotonic() - current.seen_at
                say(f"progress again, {waited:.0f} s after the ranks were asked: {text}")

    def _is_reporter(self, current: _Round) -> bool:
        """Return whether every lower rank has departed or stayed silent for 1.5 times the answer time."""
        late = monotonic() - current.seen_at > 1.5 * self._monitor.answer_seconds
        for lower in range(self._rounds.rank):
            if self._rounds.answer_of(current.number, lower) is not None:
                return False
            if not late and not self._rounds.departures([lower]):
                return False
        return True

    def _collect(self, current: _Round) -> None:
        """Read the answers; report once all have arrived or the answer time is over."""
        ranks = range(self._monitor.topology.world_size)
        found = self._rounds.answers(current.number, [r for r in ranks if r not in current.answers])
        current.answers |= {rank: Answer(**answer) for rank, answer in found.items()}
        departures = self._rounds.departures(r for r in ranks if r not in current.answers)
        complete = len(current.answers) + len(departures) == len(ranks)
        late = monotonic() - current.seen_at > self._monitor.answer_seconds
        if not (complete or late) or self._rounds.count(f"reports/{current.number}", add=1) > 1:
            return
        current.reported_here = True
        size, answers = len(ranks), current.answers
        diagnosis = diagnose(size, answers, departures)
        longest = max(answers.values(), key=lambda answer: (answer.stuck, answer.idle_seconds))
        path = self._directory / f"hang-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.txt"
        note = f"All stacks: {path}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_text(stacks_text(size, answers, departures))
        except OSError as error:
            note = f"The full stacks could not be written: {error}"
        report = (
            f"no progress for {longest.idle_seconds:.0f} s on rank {longest.rank}; {diagnosis}\n"
            f"{hang_table(size, answers, departures, diagnosis.ranks)}\n{note}"
        )
        verdict = Verdict(report=report, blocked=diagnosis.blocked, witness=longest.rank)
        self._rounds.conclude(current.number, asdict(verdict))
        if diagnosis.blocked:
            timeout_seconds = self._monitor.settings.timeout_seconds
            report += f"; a rank that is stuck ends {timeout_seconds:g} s after its last progress"
        say(report)
