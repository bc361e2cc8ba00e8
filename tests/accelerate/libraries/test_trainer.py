"""Transformers' Trainer, unchanged, on drivetrain and on the real Accelerate."""

from pathlib import Path
from typing import Any

import pytest

from accelerate_programs import run_program

pytest.importorskip("accelerate", reason="the interface is held against the real one")
pytest.importorskip("transformers", reason="its Trainer is what runs")


def trained(folder: Path, *arguments: str, ours: bool, num_processes: int = 1) -> Any:
    return run_program("with_trainer", str(folder), *arguments, ours=ours, num_processes=num_processes)


def same(found: Any, expected: Any) -> None:
    """Compare what two runs found, up to the rounding of sums in another order."""
    assert [sorted(entry) for entry in found["history"]] == [sorted(entry) for entry in expected["history"]]
    for entry, other in zip(found["history"], expected["history"], strict=True):
        assert entry == pytest.approx(other, rel=1e-4)
    assert found["rows"] == expected["rows"] == 10
    assert found["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-5)
    assert found["predictions"] == pytest.approx(expected["predictions"], rel=1e-5)


def test_one_process_trains_evaluates_and_predicts_as_with_the_real_one(tmp_path: Path) -> None:
    same(trained(tmp_path / "ours", ours=True), trained(tmp_path / "real", ours=False))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--bf16",), ("--accumulate", "1")])
def test_two_processes_do_too(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ours = trained(tmp_path / "ours", *arguments, ours=True, num_processes=2)
    same(ours, trained(tmp_path / "real", *arguments, ours=False, num_processes=2))


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended(tmp_path: Path, num_processes: int) -> None:
    whole = trained(tmp_path / "ours", ours=True, num_processes=num_processes)
    checkpoint = str(tmp_path / "ours" / "checkpoint-4")
    rest = trained(tmp_path / "rest", "--resume", checkpoint, ours=True, num_processes=num_processes)
    same(rest, whole)


@pytest.mark.slow
def test_one_process_goes_on_from_a_checkpoint_of_two_as_with_the_real_one(tmp_path: Path) -> None:
    trained(tmp_path / "two", ours=True, num_processes=2)
    resume = ("--resume", str(tmp_path / "two" / "checkpoint-4"))
    same(trained(tmp_path / "ours", *resume, ours=True), trained(tmp_path / "real", *resume, ours=False))
