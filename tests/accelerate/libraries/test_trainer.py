"""Transformers' Trainer, unchanged, on drivetrain and on the real Accelerate.

On a CPU the real one shards nothing: FSDP and DeepSpeed are held against data parallel training, whose numbers are
the same.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_programs import program_done, run_program
from optional_modules import skip_without

skip_without("accelerate")  # the interface is held against the real one
skip_without("transformers")  # its Trainer is what runs


def trained(folder: Path, *arguments: str, ours: bool, num_processes: int = 1) -> Any:
    return run_program("with_trainer", str(folder), *arguments, ours=ours, num_processes=num_processes)


# Equally many samples in each step: an epoch's tail is filled with repeats on two processes, and not on one.
FULL_BATCHES = ("--samples", "48")


def micro_batches(num_processes: int) -> tuple[str, str]:
    """Return the option for as many samples in each step as two micro-batches on each of two processes."""
    return "--accumulate", str(4 // num_processes)


def assert_same(found: Any, expected: Any) -> None:
    """Compare what two runs found, up to the rounding of sums in another order."""
    assert [sorted(entry) for entry in found["history"]] == [sorted(entry) for entry in expected["history"]]
    for entry, other in zip(found["history"], expected["history"], strict=True):
        assert entry == pytest.approx(other, rel=1e-4)
    assert found["rows"] == expected["rows"] == 10
    assert found["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-5)
    assert found["predictions"] == pytest.approx(expected["predictions"], rel=1e-5)


def assert_same_training(found: Any, expected: Any) -> None:
    """Compare runs on different numbers of processes, where an evaluation's loss is a mean over other batches."""
    steps, others = ([each for each in run["history"] if "loss" in each] for run in (found, expected))
    assert len(steps) == len(others)
    for step, other in zip(steps, others, strict=True):
        assert step == pytest.approx(other, rel=1e-4)
    assert found["predictions"] == pytest.approx(expected["predictions"], rel=1e-5)


@pytest.mark.slow
def test_one_process_trains_evaluates_and_predicts_as_with_the_real_one(tmp_path: Path) -> None:
    assert_same(trained(tmp_path / "ours", ours=True), trained(tmp_path / "real", ours=False))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--bf16",), ("--accumulate", "1")])
def test_two_processes_do_too(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ours = trained(tmp_path / "ours", *arguments, ours=True, num_processes=2)
    assert_same(ours, trained(tmp_path / "real", *arguments, ours=False, num_processes=2))


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended(tmp_path: Path, num_processes: int) -> None:
    whole = trained(tmp_path / "ours", ours=True, num_processes=num_processes)
    checkpoint = str(tmp_path / "ours" / "checkpoint-4")
    rest = trained(tmp_path / "rest", "--resume", checkpoint, ours=True, num_processes=num_processes)
    assert_same(rest, whole)


@pytest.mark.slow
def test_a_run_goes_on_at_another_number_of_processes_as_if_it_had_not_ended(tmp_path: Path) -> None:
    whole = trained(tmp_path / "two", *FULL_BATCHES, ours=True, num_processes=2)
    resume = ("--resume", str(tmp_path / "two" / "checkpoint-4"))
    rest = trained(tmp_path / "one", *FULL_BATCHES, *micro_batches(1), *resume, ours=True)
    assert_same_training(rest, whole)
    smaller = program_done("with_trainer", str(tmp_path / "smaller"), *FULL_BATCHES, *resume, ours=True)
    assert "skip_first_batches(8) leaves out 32 samples" in smaller.stderr
    assert "16 of the epoch had been read" in smaller.stderr


def zero(stage: int, **more: Any) -> tuple[str, str]:
    """Return the option for a configuration of DeepSpeed that leaves to the Trainer what it can."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"},
        "zero_allow_untested_optimizer": True,
        **dict.fromkeys((*names, "gradient_clipping"), "auto"),
        **more,
    }
    return "--deepspeed", json.dumps(config)


DIVIDED = {
    "FSDP": ("--fsdp", "{}"),
    "FSDP, files in parts": ("--fsdp", '{"state_dict_type": "SHARDED_STATE_DICT"}'),
    "ZeRO 2": zero(2),
    "ZeRO 3": zero(3),
}


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What data parallel training finds on two processes."""
    return trained(tmp_path_factory.mktemp("replicated"), *FULL_BATCHES, ours=True, num_processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_a_divided_model_trains_as_replicas_do_and_goes_on_at_another_number_of_processes(
    tmp_path: Path, replicated: Any, name: str
) -> None:
    options = (*FULL_BATCHES, *DIVIDED[name])
    assert_same(trained(tmp_path, *options, ours=True, num_processes=2), replicated)
    resume = ("--resume", str(tmp_path / "checkpoint-4"))
    number = 4 if "--fsdp" in options else 1  # the Trainer takes FSDP on several processes alone
    options += (*micro_batches(number), *resume)
    assert_same_training(trained(tmp_path / "rest", *options, ours=True, num_processes=number), replicated)


@pytest.mark.slow
def test_a_trainer_trains_adapters_twice_on_replicas_and_on_a_divided_base(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the adapters are its")
    options = (*FULL_BATCHES, "--times", "2", "--lora")
    replicas = trained(tmp_path / "ours", *options, ours=True, num_processes=2)
    assert_same(replicas, trained(tmp_path / "real", *options, ours=False, num_processes=2))
    assert_same(trained(tmp_path / "fsdp", *options, *DIVIDED["FSDP"], ours=True, num_processes=2), replicas)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FSDP", "ZeRO 2", "ZeRO 3"])
def test_adapters_train_on_a_divided_base_and_go_on(tmp_path: Path, name: str) -> None:
    pytest.importorskip("peft", reason="the adapters are its")
    options = ("--lora", *DIVIDED[name])
    whole = trained(tmp_path / "whole", *options, ours=True, num_processes=2)
    assert_same(whole, trained(tmp_path / "replicas", "--lora", ours=True, num_processes=2))
    resume = ("--resume", str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(trained(tmp_path / "rest", *options, *resume, ours=True, num_processes=2), whole)


def decaying_rates(*, num_steps: int) -> list[float]:
    """Return the rates of DeepSpeed's own schedule after each step."""
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1e-3)
    schedule = WarmupDecayLR(optimizer, num_steps, warmup_max_lr=1e-3, warmup_num_steps=2)
    rates: list[float] = []
    for _ in range(num_steps):
        schedule.step()
        rates += schedule.get_last_lr()
    return rates


@pytest.mark.slow
def test_the_optimizer_and_schedule_of_a_configuration_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    params = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(params, "auto")},
    }
    config = zero(2, **sections)
    whole = trained(tmp_path / "whole", *config, ours=True, num_processes=2)
    rates = [entry["learning_rate"] for entry in whole["history"] if "learning_rate" in entry]
    assert rates == pytest.approx(decaying_rates(num_steps=len(rates)))
    resume = ("--resume", str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(trained(tmp_path / "rest", *config, *resume, ours=True, num_processes=2), whole)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", ours=True)
    killed = program_done("with_trainer", str(tmp_path / "killed"), "--die-after", "5", ours=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "killed" / "checkpoint-4" / "trainer_state.json").is_file()
    resume = ("--resume", str(tmp_path / "killed" / "checkpoint-4"))
    assert_same(trained(tmp_path / "rest", *resume, ours=True), whole)
