import json
import logging
from typing import Any

import pytest
import torch

from drivetrain import Accelerator, ConfigError
from drivetrain_backends import NonFiniteGradientError, SingleBackend, register_backend
from drivetrain_checkpoint import CheckpointSettings
from drivetrain_config import Layers
from drivetrain_state import StateSettings


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
    (record,) = [r for r in caplog.records if r.name == "drivetrain.accelerator.compose"]
    assert "seed" in record.getMessage()
    assert "1" in record.getMessage()
    assert "--seed" in record.getMessage()


def test_settings_of_a_backend_that_does_not_run_are_told(caplog) -> None:
    layers = Layers.read(command_line={"fsdp": {"offload": "true"}, "run": {"cpu": "true"}})
    with caplog.at_level(logging.WARNING):
        Accelerator(config=layers)
    (record,) = [r for r in caplog.records if r.name == "drivetrain.accelerator.compose"]
    assert record.getMessage() == (
        "fsdp: offload=True (--fsdp-offload on the command line) has no effect, since this run uses SingleBackend; "
        "backend='fsdp' or --backend fsdp uses it"
    )


def test_settings_of_another_precision_are_told(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        Accelerator(
            cpu=True, mixed_precision="bf16", sections={"precision": {"fp8_recipe": "torchao_rowwise"}}
        )
    (record,) = [r for r in caplog.records if r.name == "drivetrain.accelerator.compose"]
    assert record.getMessage() == (
        "precision: fp8_recipe='torchao_rowwise' (code) has no effect, since it needs run.mixed_precision=fp8"
    )


UNREAD = [
    ({"fsdp": {"offload": True, "wrap": ("Block",)}}, "fsdp.wrap, fsdp.offload", "backend='fsdp' or"),
    (
        {"ddp": {"static_graph": True}, "deepspeed": {"stage": 1}},
        "ddp.static_graph, deepspeed.stage",
        "--backend ddp",
    ),
    ({"launch": {"num_processes": 2}}, "launch.num_processes", "it is no part of this program"),
    ({"tracking": {"flush_seconds": 2.0}}, "tracking.flush_seconds", "it needs run.log_with"),
    (
        {"tracking": {"peak_flops": 1e12}},
        "tracking.peak_flops",
        "it needs tracking.throughput or tracking.throughput_every_steps or tracking.live_line",
    ),
    (
        {"state": {"watchdog": False, "hang_timeout_seconds": 9.0}},
        "state.hang_timeout_seconds",
        "it needs state.watchdog",
    ),
    ({"checkpoint": {"best_mode": "max"}}, "checkpoint.best_mode", "it needs checkpoint.best_metric"),
    ({"data": {"read_ahead": True, "dispatch": False}}, "data.read_ahead", "it needs data.dispatch!=False"),
]


@pytest.mark.default_cases("code", "environment-sections0", "file-sections0", "file-sections2")
@pytest.mark.parametrize(("sections", "names", "why"), UNREAD)
@pytest.mark.parametrize("by", ["code", "environment", "file"])
def test_what_nothing_reads_is_told_whoever_says_it(
    sections: dict[str, Any], names: str, why: str, by: str, tmp_path, monkeypatch, caplog
) -> None:
    file = None
    if by == "file":
        file = tmp_path / "run.json"
        file.write_text(json.dumps(sections))
    elif by == "environment":
        for section, values in sections.items():
            for name, value in values.items():
                text = ",".join(value) if isinstance(value, tuple) else str(value)
                monkeypatch.setenv(f"DRIVETRAIN_{section}__{name}".upper(), text)
    accelerator = Accelerator(cpu=True, config=file, sections=sections if by == "code" else None)
    if "launch" in sections and by != "code":  # the launcher's, and not of this program
        assert caplog.text == ""
        return
    assert set(accelerator.plan.facts["without effect"].split(", ")) == set(names.split(", "))
    told = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert len(told) == len(sections.keys() - {"state"} or sections)
    assert why in told[0]


def test_settings_that_are_read_are_not_told(tmp_path, caplog) -> None:
    sections = {
        "tracking": {"flush_seconds": 2.0, "throughput": True, "peak_flops": 1e12},
        "checkpoint": {"best_metric": "loss", "best_mode": "max"},
        "state": {"hang_timeout_seconds": 90.0},
        "run": {"show_plan": False},
    }
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, log_with="jsonl", sections=sections)
    assert "without effect" not in accelerator.plan.facts
    assert caplog.text == ""


@pytest.mark.parametrize("saves", [False, True])
def test_settings_of_saves_that_are_never_made_are_told_at_the_end(saves: bool, tmp_path, caplog) -> None:
    sections = {"checkpoint": {"keep_last": 2, "save_every_steps": 1}, "run": {"show_plan": False}}
    with Accelerator(cpu=True, project_dir=tmp_path, sections=sections) as accelerator:
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        if saves:
            accelerator.save_if_due()
    told = [record.getMessage() for record in caplog.records]
    assert told == (
        []
        if saves
        else [
            "checkpoint: keep_last=2 (code) has no effect, since it needs a save",
            "checkpoint: save_every_steps=1 (code) has no effect, since it needs a call of save_if_due()",
        ]
    )


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


def test_gradients_are_looked_at_where_the_run_says_so() -> None:
    accelerator = Accelerator(cpu=True, sections={"run": {"on_nonfinite": "raise", "show_plan": False}})
    (row,) = [row for row in accelerator.plan.rows if row.setting == "run.on_nonfinite"]
    assert (row.asked, row.applied, row.read_back) == ("raise", "raise", True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.backward(model(torch.full((1, 2), torch.inf)).sum())
    with pytest.raises(NonFiniteGradientError, match="the gradient of weight holds"):
        optimizer.step()


def test_a_backend_that_looks_at_no_gradients_is_refused_where_the_run_wants_it() -> None:
    class Blind(SingleBackend):
        def applied(self):
            return {name: value for name, value in super().applied().items() if name != "on_nonfinite"}

    assert Accelerator(cpu=True, backend=Blind).settings.on_nonfinite == "warn"
    with pytest.raises(ConfigError, match="Blind does not look for infinities and NaNs"):
        Accelerator(cpu=True, backend=Blind, sections={"run": {"on_nonfinite": "skip"}})


def test_sections_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(TypeError, match=r"sections=\[1\]: must be a mapping of sections by name"):
        Accelerator(cpu=True, sections=[1])


def test_every_section_can_be_given_in_code() -> None:
    sections = {
        "run": {"show_plan": False},
        "checkpoint": CheckpointSettings(keep_last=7),
        "ddp": {"static_graph": True},  # for the launches of this program on several processes
    }
    accelerator = Accelerator(cpu=True, sections=sections, data={"even": "pad"})
    assert not accelerator.settings.show_plan
    asked = {row.setting: (row.asked, row.source) for row in accelerator.plan.rows}
    assert asked["checkpoint.keep_last"] == (7, "code")
    assert asked["data.even"] == ("pad", "code")


@pytest.mark.parametrize(
    ("sections", "error", "says"),
    [
        ({"dpp": {}}, ConfigError, "there is no section 'dpp'; did you mean ddp; sections here: .*ddp"),
        ({"ddp": {"static": True}}, ConfigError, "section 'ddp' has no field 'static'"),
        ({"state": {"timeout_seconds": "long"}}, ConfigError, "timeout_seconds"),
        ({"state": 3}, TypeError, "sections\\[.state.\\]=3: a section is its dataclass or a mapping"),
        ({"data": {}}, ValueError, "both given: give one of them"),
    ],
)
def test_a_section_in_code_is_checked_whether_it_is_used_or_not(sections, error, says: str) -> None:
    with pytest.raises(error, match=says):
        Accelerator(cpu=True, sections=sections, data={"even": "pad"})


def test_cpu_holds_whatever_else_the_state_section_says_and_contradicts_another_device() -> None:
    assert Accelerator(cpu=True, sections={"state": StateSettings(timeout_seconds=60)}).device.type == "cpu"
    with pytest.raises(ValueError, match=r"device='cuda' contradict each other"):
        Accelerator(cpu=True, sections={"state": {"device": "cuda"}})


def test_a_function_for_a_strategy_is_sent_to_shard_loader() -> None:
    with pytest.raises(ValueError, match=r"data\.strategy=len: .*drivetrain_data\.shard_loader"):
        Accelerator(cpu=True, data={"strategy": len})


def test_a_run_that_does_not_come_to_be_leaves_no_process_group() -> None:
    with pytest.raises(ConfigError, match="no section 'nothing'"):
        Accelerator(backend="ddp", cpu=True, sections={"nothing": {}})
    assert not torch.distributed.is_initialized()


NO_MESHES = [
    (
        {"tensor": 3},
        "tensor=3 makes 3, which does not divide world_size=2: change a size or start a multiple",
    ),
    ({"shard": -1, "tensor": -1}, "shard=-1 and tensor=-1: only one size may be -1"),
    ({"shard": 2, "expert": 3}, "expert=3 with shard=2 .*: .* these 2 processes; expert may be 1, 2"),
    ({"context": 2, "sequence": True}, "sequence=True with context=2: .*; leave sequence out"),
]


@pytest.mark.ranks(2)
def test_sizes_that_make_no_mesh_are_refused_on_every_rank_with_what_would_do() -> None:
    for said, match in NO_MESHES:
        with pytest.raises(ValueError, match=match):
            Accelerator(cpu=True, sections={"parallel": said})
