import logging

import pytest

from drivetrain import Accelerator, ConfigError
from drivetrain_backends import SingleBackend, register_backend
from drivetrain_config import Layers


def test_a_file_sets_what_code_does_not(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\ngradient_accumulation_steps = 4\nseed = 7\n[data]\neven = 'drop'\n")
    accelerator = Accelerator(cpu=True, seed=1, config=file)
    assert (accelerator.gradient_accumulation_steps, accelerator.settings.seed) == (4, 1)
    rows = {row.setting: row for row in accelerator.plan.rows}
    assert rows["run.gradient_accumulation_steps"].source.startswith(str(file))
    assert rows["data.even"].asked == "drop"


def test_code_against_the_command_line_is_reported_with_both_values(caplog) -> None:
    layers = Layers.read(command_line={"run": {"seed": "2"}})
    with caplog.at_level(logging.WARNING):
        Accelerator(cpu=True, seed=1, config=layers)
    (record,) = [r for r in caplog.records if r.name == "drivetrain.compose"]
    assert "seed" in record.getMessage()
    assert "1" in record.getMessage()
    assert "--seed" in record.getMessage()


def test_an_unknown_key_in_a_file_is_named(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run:\n  mixed_precison: bf16\n")
    with pytest.raises(ConfigError, match="mixed_precison"):
        Accelerator(cpu=True, config=file)


def test_a_backend_comes_as_class_or_from_a_registry() -> None:
    class Mine(SingleBackend):
        pass

    given = Accelerator(cpu=True, backend=Mine)
    named = Accelerator(cpu=True, backend="mine", registry=register_backend("mine", Mine))
    assert given.plan.facts["backend"] == named.plan.facts["backend"] == "Mine"
