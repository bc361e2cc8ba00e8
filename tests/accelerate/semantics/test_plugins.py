"""Rows of the table "Where it differs" about the plugins of FSDP and DeepSpeed."""

from pathlib import Path
from typing import Any

import pytest

from accelerate_sides import OURS, RESTORED, SIDES, THEIRS, said
from drivetrain_accelerate.accelerator.composition import plan_composition
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.strictness import is_strict

pytest.importorskip("accelerate")


def planned_sections(plugin: Any) -> dict[str, Any]:
    """Return the settings of a run in bf16 that is sharded."""
    options = RunOptions(mixed_precision="bf16", fsdp_plugin=plugin)
    return plan_composition(options, deepspeed_plugin=None, num_processes=2, is_strict=is_strict()).sections


def test_versions_of_fsdp() -> None:
    """FSDP"""
    policies: dict[str, list[str]] = {}
    for side in (THEIRS, OURS):
        plugins = [
            side("accelerate.FullyShardedDataParallelPlugin")(fsdp_version=version) for version in (1, 2)
        ]
        if side is OURS:
            first, second = map(planned_sections, plugins)
            assert first == second
            with side.accelerator(fsdp_plugin=plugins[0]) as accelerator:
                assert accelerator.is_fsdp2
        for plugin in plugins:
            plugin.set_mixed_precision("bf16")
        policies[side.name] = [type(plugin.mixed_precision_policy).__name__ for plugin in plugins]
    assert policies["theirs"] == policies["ours"] == ["MixedPrecision", "MixedPrecisionPolicy"]


def test_reduction_in_half_precision() -> None:
    """FSDP's reduction in half precision"""
    real = THEIRS("accelerate.FullyShardedDataParallelPlugin")(fsdp_version=2)
    real.set_mixed_precision("bf16")
    assert str(real.mixed_precision_policy.reduce_dtype) == "torch.bfloat16"
    found: list[Any] = []
    for side in (OURS, RESTORED):
        with side.entered():
            sections = planned_sections(side("accelerate.FullyShardedDataParallelPlugin")(fsdp_version=2))
        found.append(sections.get("precision", {}).get("reduce_dtype"))
    assert found == [None, "bf16"]


def test_a_key_that_comes_twice(tmp_path: Path) -> None:
    """a key that comes twice in a DeepSpeed JSON"""
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "zero_optimization": {"stage": 3}}')
    found: list[Any] = []
    for side in SIDES:
        with side.entered():
            config = side("accelerate.utils.deepspeed.HfDeepSpeedConfig")
            found.append(said(lambda config=config: config(str(file)).config["zero_optimization"]["stage"]))
    theirs, ours, restored = found
    assert theirs == restored == 3
    assert "zero_optimization stands there twice" in ours
