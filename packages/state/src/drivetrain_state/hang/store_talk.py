"""The questions, answers and reports that ranks exchange about a hang through the shared store."""

import os
import socket
import threading
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import monotonic

from torch.distributed import DistError

from drivetrain_state.hang.guard import Guard, say
from drivetrain_state.hang.report import Answer, diagnose, hang_table, stacks_text
from drivetrain_state.hang.rounds import HangRounds, Verdict
from drivetrain_state.hang.stack import find_place, stack_text, thread_frames


@dataclass(slots=True, kw_only=True)
class _Round:
    """The state of the newest round, as one rank knows it."""

    number: int
    seen_at: float = field(default_factory=monotonic)
    beats: int = 0
    idle_seconds: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict[int, Answer])
    verdict: Verdict | None = None
    reported_here: bool = False
    over: bool = False


class Talker(threading.Thread):
    """A thread that asks, answers and reports about hangs; all use of the store goes through it."""

    def __init__(self, guard: Guard, rounds: HangRounds, *, directory: Path) -> None:
        super().__init__(name="drivetrain-talker", daemon=True)
        self._guard = guard
        self._rounds = rounds
        self._directory = directory
        self._round = _Round(number=rounds.newest(), over=True)
        self._false_alarms = 0
        self._fruitless = 0  # number of rounds since this rank's last progress
        self._beats = 0
        self._quiet_until = 0.0

    def run(self) -> None:
        """Poll the store until the guard stops or the store is gone."""
        try:
            while not self._guard.stopping.wait(self._guard.poll_seconds):
                self._turn()
                self._guard.heard_at = monotonic()
            # In a last turn, this rank still answers and reports its latest progress before it departs.
            self._guard.pulse.look()
            self._turn()
            self._rounds.depart(self._guard.ending)
        except (DistError, OSError):
            # The store's host is gone, often because it has just finished: the guard decides.
            self._guard.heard_at = float("-inf")
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
        """Return whether this rank has been idle long enough, and the last question is long enough ago, to ask."""
        pulse, settings = self._guard.pulse, self._guard.settings
        if pulse.beats != self._beats:
            self._beats, self._fruitless, self._quiet_until = pulse.beats, 0, 0.0
        hang = settings.hang_timeout_seconds
        # Wait longer after each false alarm, but never so long that the process ends without a report.
        patience = min(hang * (1 + self._false_alarms), max(hang, settings.timeout_seconds / 2))
        if self._guard.is_condemned and pulse.idle_seconds > 0.9 * settings.timeout_seconds:
            # Other ranks are ending because of the same hang, and a new report would accuse them.
            return False
        return pulse.idle_seconds > patience and monotonic() >= self._quiet_until

    def _answer(self, number: int) -> None:
        pulse = self._guard.pulse
        frames = thread_frames(pulse.latest.thread_id)
        place = find_place(frames)
        answer = Answer(
            rank=self._guard.topology.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            idle_seconds=pulse.idle_seconds,
            label=pulse.latest.label,
            where=place.where,
            call=place.call,
            waits=place.waits_for != "nothing",
            stuck=self._guard.stuck(place),
            stack=stack_text(frames),
        )
        self._rounds.answer(number, answer)
        self._round = _Round(number=number, beats=pulse.beats, idle_seconds=answer.idle_seconds)
        self._fruitless += 1
        self._quiet_until = monotonic() + self._guard.settings.hang_timeout_seconds * 2**self._fruitless

    def _follow(self, current: _Round) -> None:
        """Report if this rank is the reporter, read the verdict, and detect that the run resumes."""
        if current.verdict is None:
            if self._is_reporter(current):
                self._collect(current)
            current.verdict = self._rounds.verdict(current.number)
            if current.verdict is not None:
                self._guard.learn(current.verdict)
            return
        pulse, rank = self._guard.pulse, self._guard.topology.rank
        if current.verdict.witness == rank and pulse.beats != current.beats:
            self._rounds.resume(current.number, f"rank {rank} went on with: {pulse.latest.label}")
        if (text := self._rounds.resumed(current.number)) is not None:
            current.over = True
            self._guard.learn(None)
            self._false_alarms += 1
            if current.reported_here:
                waited = monotonic() - current.seen_at
                say(f"drivetrain: progress again, {waited:.0f} s after the ranks were asked: {text}\n")

    def _is_reporter(self, current: _Round) -> bool:
        """Return whether every lower rank has departed, or is silent after 1.5 times the answer time."""
        late = monotonic() - current.seen_at > 1.5 * self._guard.answer_seconds
        for lower in range(self._guard.topology.rank):
            if self._rounds.has_answered(current.number, lower):
                return False
            if not late and not self._rounds.departures([lower]):
                return False
        return True

    def _collect(self, current: _Round) -> None:
        """Read the answers; report once all have arrived or the answer time is over."""
        ranks = range(self._guard.topology.world_size)
        current.answers |= self._rounds.answers(
            current.number, [r for r in ranks if r not in current.answers]
        )
        departures = self._rounds.departures(r for r in ranks if r not in current.answers)
        complete = len(current.answers) + len(departures) == len(ranks)
        late = monotonic() - current.seen_at > self._guard.answer_seconds
        if (complete or late) and self._rounds.claim_report(current.number):
            current.reported_here = True
            self._report(current, departures)

    def _report(self, current: _Round, departures: dict[int, str]) -> None:
        size, answers = self._guard.topology.world_size, current.answers
        diagnosis = diagnose(size, answers, departures)
        longest = max(answers.values(), key=lambda answer: (answer.stuck, answer.idle_seconds))
        stacks, note = self._write(stacks_text(size, answers, departures))
        verdict = Verdict(text=str(diagnosis), blocked=diagnosis.blocked, witness=longest.rank, stacks=stacks)
        self._rounds.conclude(current.number, verdict)
        timeout = f"{self._guard.settings.timeout_seconds:g} s"
        say(
            f"drivetrain: no progress for {longest.idle_seconds:.0f} s on rank {longest.rank}; {diagnosis}\n"
            f"{hang_table(size, answers, departures, diagnosis.ranks)}\n{note}"
            + (
                f"; a rank that is stuck ends {timeout} after its last progress\n"
                if diagnosis.blocked
                else "\n"
            )
        )

    def _write(self, text: str) -> tuple[str, str]:
        """Write the stacks to a new file; return its path and a sentence that gives it."""
        path = self._directory / f"hang-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.txt"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            return "", f"The full stacks could not be written: {error}"
        return str(path), f"All stacks: {path}"
