"""Rows of the table "Where it differs" about the plugins of FSDP and DeepSpeed."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from accelerate_sides import OURS, RESTORED, SIDES, THEIRS, on_sides, said
from drivetrain_accelerate.accelerator.composition import plan_composition
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.strictness import is_strict
from drivetrain_config import environ

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


def test_a_second_accelerator_with_other_options() -> None:
    """a second Accelerator with other options of compilation or sharding than the first"""
    found: list[Any] = []
    for side in (THEIRS, OURS):
        with side.accelerator(dynamo_backend="eager"):
            second = said(
                lambda side=side: (
                    side("accelerate.Accelerator")(dynamo_backend="inductor").state.dynamo_plugin
                )
            )
            found.append(str(getattr(second, "backend", second)))
    theirs, ours = found
    assert "EAGER" in theirs
    assert "the first Accelerator of this process has another" in ours


def test_a_variable_beside_a_number_in_code() -> None:
    """`ACCELERATE_GRADIENT_ACCUMULATION_STEPS` beside another number in code"""
    with environ.exported(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4"):
        found = on_sides(lambda each: each.gradient_accumulation_steps, SIDES, gradient_accumulation_steps=2)
    assert found == [4, 2, 2]


def note_dtype(seen: list[torch.dtype], module: Any, inputs: Any, output: Any) -> None:
    seen.append(output.dtype)


def test_autocast_that_is_off_for_models() -> None:
    """`AutocastKwargs(enabled=False)` for a run in half precision"""
    found: list[Any] = []
    for side in (THEIRS, OURS):
        handler = side("accelerate.utils.AutocastKwargs")(enabled=False)
        layer, seen = torch.nn.Linear(1, 1), list[torch.dtype]()
        model: Any = torch.nn.Sequential(layer)
        layer.register_forward_hook(partial(note_dtype, seen))
        with side.accelerator(mixed_precision="bf16", kwargs_handlers=[handler]) as accelerator:
            found.append(said(lambda a=accelerator, m=model: str(a.prepare(m)(torch.ones(1, 1)).dtype)))
        found.append(seen)
    assert found[:2] == ["torch.float32", [torch.float32]]
    assert "models would not compute in mixed_precision='bf16'" in found[2]


def test_a_forward_that_is_replaced() -> None:
    """a `forward` that the program sets on a prepared model, in half precision"""
    given = torch.nn.Linear(4, 3)
    expected = given(batch := torch.rand(2, 4))

    def outputs(accelerator: Any) -> torch.Tensor:
        model = accelerator.prepare(deepcopy(given))
        model.forward = partial(linear, weight=model.weight, bias=model.bias)
        return model(batch)

    found = on_sides(outputs, SIDES, mixed_precision="bf16")
    assert torch.equal(found[0], expected)
    for restored in found[1:]:
        assert torch.equal(restored, given.bfloat16()(batch.bfloat16()).float())


def test_a_limit_without_automatic_names(tmp_path: Path) -> None:
    """`ProjectConfiguration(total_limit=)` without automatic names"""
    found: list[str] = []
    outcome: Any = None
    for side in (THEIRS, OURS):
        project = side("accelerate.utils.ProjectConfiguration")(str(tmp_path), total_limit=1)
        with side.accelerator(project_config=project) as accelerator:
            for folder in (tmp_path / side.name / "a", tmp_path / side.name / "b"):
                outcome = said(lambda a=accelerator, folder=folder: a.save_state(str(folder)))
        found.append(str(outcome))
    kept = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert kept == ["a", "b"]
    assert "say automatic_checkpoint_naming=True too" in found[1]
