from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from drivetrain_checkpoint import Checkpointer, find_checkpoints
from drivetrain_checkpoint.retention import delete, plan_retention
from drivetrain_checkpoint.survey import Found
from drivetrain_state import Context

KINDS = st.sampled_from(["valid", "damaged", "uncompleted"])


def found(number: int, kind: str) -> Found:
    return Found(
        folder=Path(f"step-{number}"),
        committed=kind != "uncompleted",
        manifest=None,
        problem=None if kind == "valid" else kind,
    )


@given(st.lists(KINDS, max_size=12), st.integers(min_value=1, max_value=5))
def test_the_newest_valid_ones_stay(kinds: list[str], keep_last: int) -> None:
    ones = [found(number, kind) for number, kind in enumerate(kinds)]
    gone = set(plan_retention(ones, keep_last=keep_last))
    valid = [one.folder for one in ones if one.is_valid]
    assert gone.isdisjoint(valid[:keep_last])
    assert gone.isdisjoint(one.folder for one in ones if one.committed and not one.is_valid)
    assert gone >= set(valid[keep_last:])
    if not valid:
        assert not gone


@given(st.lists(KINDS, max_size=12))
def test_unset_keeps_all(kinds: list[str]) -> None:
    assert plan_retention([found(n, kind) for n, kind in enumerate(kinds)], keep_last=None) == ()


def test_files_of_others_survive_with_a_warning(tmp_path: Path, context: Context, caplog) -> None:
    path = Checkpointer(context, tmp_path).save(1, models={}, replicated={}, per_rank={})
    (path / "notes.txt").write_text("mine")
    delete([path])
    assert [file.name for file in path.iterdir()] == ["notes.txt"]
    assert "step-1 could not be deleted whole" in caplog.text
    assert not any(one.is_valid for one in find_checkpoints(tmp_path))
