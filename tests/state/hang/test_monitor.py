from pathlib import Path

from torch.distributed import HashStore

from drivetrain_state import ProgressRecord, StateSettings, Topology
from drivetrain_state.hang.monitor import HangMonitor
from drivetrain_state.hang.report import Verdict


def verdict(report: str, *, blocked: bool = True) -> Verdict:
    return Verdict(report=report, blocked=blocked, witness=0)


def test_the_note_for_the_launcher_is_there_as_long_as_ranks_are_blocked(tmp_path: Path) -> None:
    note = tmp_path / "hang.txt"
    monitor = HangMonitor(
        topology=Topology(rank=0, world_size=2, local_rank=0, local_world_size=2),
        settings=StateSettings(),
        record=ProgressRecord(),
        store=HashStore(),
        note=note,
    )
    monitor.learn(verdict("just slow", blocked=False))
    assert not note.exists()
    monitor.learn(verdict("rank 1 loops"))
    monitor.learn(verdict("just slow", blocked=False))
    assert note.read_text() == "rank 1 loops"
    monitor.learn(None)
    assert not note.exists()
