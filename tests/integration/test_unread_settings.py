import json
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain_backends.settings import DDPSettings
from drivetrain_config import sections
from drivetrain_config.settings.unread import EVENTS

# Settings that have an effect whatever else is said. Those of `launch` and `accelerate` are not the Accelerator's.
READ_ALWAYS = {
    "checkpoint": "directory",
    "ddp": "reduce static_graph broadcast_buffers sync_batch_norm communication_hook check_drift_every",
    "deepspeed": "config stage offload_optimizer offload_param reduce_bucket_size allgather_bucket_size overlap_comm "
    "grad_accum_dtype communication_data_type",
    "fsdp": "strategy shard_size wrap min_num_params upcast broadcast_buffers check_optimizers offload pin_memory "
    "prefetch",
    "megatron": "find_unused_parameters bucket_size_mb check_drift_every",
    "model": "activation_checkpointing compile",
    "parallel": "data shard context tensor pipeline expert",
    "precision": "check_half param_dtype reduce_dtype output_dtype buffer_dtype keep_fp32 weight_update "
    "watch_underflow",
    "run": "mixed_precision backend gradient_accumulation_steps accumulation_world_size on_nonfinite cpu seed "
    "project_dir log_with show_plan verbose",
    "state": "device timeout_seconds watchdog debug deterministic",
    "xla": "spmd cache_dir",
    "tracking": "throughput throughput_every_steps live_line",
}
OURS = {name: kind for name, kind in sections().items() if name not in ("launch", "accelerate")}


@pytest.mark.parametrize("section", sorted(OURS))
def test_each_setting_is_read_always_or_says_what_it_needs(section: str) -> None:
    silent = {each.name for each in fields(OURS[section]) if "needs" not in each.metadata}
    assert silent == set(READ_ALWAYS.get(section, "").split())


@pytest.mark.parametrize("section", sorted(OURS))
def test_what_a_setting_needs_is_something_that_there_is(section: str) -> None:
    names = {each.name for each in fields(OURS[section])}
    names |= {"run.mixed_precision", "run.on_nonfinite", "run.log_with"}
    conditions = [each.metadata["needs"] for each in fields(OURS[section]) if "needs" in each.metadata]
    words = [word for each in conditions for both in each.split(" and ") for word in both.split(" or ")]
    assert {word.partition("=")[0].rstrip("!") for word in words if word not in EVENTS} <= names


CASES = [
    ("ddp", {"ddp": {"power_sgd_rank": 4, "power_sgd_start_step": 50}}, "communication_hook=power_sgd"),
    ("ddp", {"ddp": {"communication_hook": "bf16", "power_sgd_rank": 4}}, "communication_hook=power_sgd"),
    ("ddp", {"ddp": {"reduce": "at_close", "bucket_size_mb": 50.0}}, "reduce!=at_close"),
    ("ddp", {"ddp": {"reduce": "at_close", "find_unused_parameters": True}}, "reduce!=at_close"),
    (None, {"precision": {"initial_scale": 4.0}}, "run.mixed_precision=fp16"),
    (
        None,
        {"precision": {"max_skipped_steps": 3}},
        "run.mixed_precision=fp16 or run.on_nonfinite=skip",
    ),
]


@pytest.mark.parametrize(("backend", "said", "needs"), CASES)
def test_a_setting_whose_condition_does_not_hold_is_told(
    backend: str | None, said: Any, needs: str, caplog
) -> None:
    accelerator = Accelerator(cpu=True, backend=backend, sections=said)
    (section, names), *_ = said.items()
    told = accelerator.plan.facts["without effect"].split(", ")
    assert told == [f"{section}.{name}" for name in names if name not in ("reduce", "communication_hook")]
    (record,) = [record for record in caplog.records if "has no effect" in record.getMessage()]
    assert record.getMessage().endswith(f"has no effect, since it needs {_in_full(needs, section)}")
    accelerator.end_training()


def _in_full(needs: str, section: str) -> str:
    return needs if needs.startswith(("run.", f"{section}.")) else f"{section}.{needs}"


def test_a_setting_whose_condition_holds_and_a_default_in_code_are_not_told(caplog) -> None:
    ddp = DDPSettings(communication_hook="power_sgd", power_sgd_rank=4)
    Accelerator(cpu=True, backend="ddp", sections={"ddp": ddp}).end_training()
    Accelerator(cpu=True, backend="ddp", sections={"ddp": DDPSettings(static_graph=True)}).end_training()
    skip = {"run": {"on_nonfinite": "skip"}, "precision": {"max_skipped_steps": 3}}
    Accelerator(cpu=True, sections=skip).end_training()
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize("by", ["code", "file"])
@pytest.mark.parametrize("uses", [False, True])
def test_what_a_run_had_no_use_for_is_told_once_at_its_end(by: str, uses: bool, tmp_path, caplog) -> None:
    if uses:
        pytest.importorskip("upath")
    said: dict[str, dict[str, Any]] = {
        "data": {"even": "pad", "copy_ahead": 3, "split_batches": True, "seed": 3},
        "checkpoint": {"allow_pickle": True, "stall_seconds": 5.0, "storage_options": {"auto_mkdir": True}},
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(said))
    by_code = by == "code"
    accelerator = Accelerator(cpu=True, sections=said if by_code else None, config=None if by_code else file)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if uses:
        accelerator.prepare(DataLoader(torch.ones(2, 1)))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    if uses:
        accelerator.save_state(f"memory://{tmp_path}")
    assert "has no effect" not in caplog.text
    accelerator.end_training()
    accelerator.end_training()
    told = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    if uses:
        assert told == []
        return
    assert [line.rpartition("since it needs ")[2] for line in told] == [
        "a prepared loader",
        "a checkpoint at a URL",
        "a checkpoint",
        "a save or a call of save_if_due()",
    ]
    assert all(f"{name}=" in told[0] for name in said["data"])
    assert "storage_options=***" in told[1]


def test_options_of_urls_are_told_where_checkpoints_go_into_a_folder(tmp_path, caplog) -> None:
    options = {"checkpoint": {"storage_options": {"anon": True}}}
    with Accelerator(cpu=True, project_dir=tmp_path, sections=options) as accelerator:
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        accelerator.save_state()
    (record,) = [r for r in caplog.records if "has no effect" in r.getMessage()]
    assert record.getMessage().endswith("since it needs a checkpoint at a URL")
