"""Libraries that call Accelerate, unchanged, on drivetrain and on the real one: equal losses and results."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from accelerate_programs import run_program

pytest.importorskip("accelerate", reason="the interface is held against the real one")

pytestmark = pytest.mark.slow


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip a test where a library that its program imports is not installed; importing it here would take seconds."""
    missing = [each for each in libraries if find_spec(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed")


def values(found: Any, place: str = "") -> dict[str, Any]:
    """Return the values of nested lists and dicts by their place."""
    if not isinstance(found, dict | list):
        return {place: found}
    items = found.items() if isinstance(found, dict) else enumerate(found)
    return {at: value for key, each in items for at, value in values(each, f"{place}/{key}").items()}


def assert_same(found: Any, expected: Any) -> None:
    """Compare what two runs found, numbers up to the rounding of sums in another order."""
    ours, theirs = values(found), values(expected)
    numbers = {place: value for place, value in theirs.items() if isinstance(value, float)}
    assert ours == theirs | {place: pytest.approx(value, rel=1e-4) for place, value in numbers.items()}


def assert_equal_on_both(name: str, folder: Path, *arguments: str, num_processes: int = 1) -> Any:
    """Run a program on both, compare what it found, and return it."""
    ours = run_program(name, str(folder / "ours"), *arguments, ours=True, num_processes=num_processes)
    real = run_program(name, str(folder / "real"), *arguments, ours=False, num_processes=num_processes)
    assert_same(ours, real)
    return ours


@needs("transformers")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_trainer_does_the_same_however_it_is_used(tmp_path: Path, num_processes: int) -> None:
    assert_equal_on_both("with_trainer_options", tmp_path, num_processes=num_processes)


@needs("trl")
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("kind", ["sft", "completions", "packed", "dpo", "reward"])
def test_trl_trains_from_texts_and_preferences(tmp_path: Path, kind: str, num_processes: int) -> None:
    assert_equal_on_both("with_trl", tmp_path, kind, num_processes=num_processes)


@needs("trl", "peft")
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("kind", ["grpo", "grpo-adapter", "rloo", "kto", "orpo", "cpo"])
def test_trl_learns_from_sampled_completions_and_labels(
    tmp_path: Path, kind: str, num_processes: int
) -> None:
    assert_equal_on_both("with_trl_rewards", tmp_path, kind, num_processes=num_processes)


@needs("sentence_transformers")
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("loss", ["CosineSimilarityLoss", "MultipleNegativesRankingLoss"])
def test_sentence_transformers_train(tmp_path: Path, loss: str, num_processes: int) -> None:
    assert_equal_on_both("with_sentence_transformers", tmp_path, "--loss", loss, num_processes=num_processes)


@needs("peft")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_adapter_of_peft_is_trained_saved_and_merged(tmp_path: Path, num_processes: int) -> None:
    found = assert_equal_on_both("with_peft", tmp_path, num_processes=num_processes)
    assert found["merged"] == pytest.approx(found["trained"], rel=1e-5)


@needs("peft")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_adapters_run_goes_on_from_its_checkpoint(tmp_path: Path, num_processes: int) -> None:
    whole = run_program("with_peft", str(tmp_path / "whole"), ours=True, num_processes=num_processes)
    resume = ("--resume", str(tmp_path / "whole" / "checkpoint-4"))
    rest = run_program("with_peft", str(tmp_path / "rest"), *resume, ours=True, num_processes=num_processes)
    assert_same(rest, whole)


@needs("peft", "bitsandbytes", "torchao")
@pytest.mark.parametrize("map_", [(), ("--device-map", "auto")])
def test_quantised_weights_are_loaded_computed_with_and_adapted(
    tmp_path: Path, map_: tuple[str, ...]
) -> None:
    assert_equal_on_both("with_quantized", tmp_path, "nf4", "fp4", "int8", "torchao", "--train", *map_)
