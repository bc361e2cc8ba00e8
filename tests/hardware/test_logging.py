"""Logging of numbers that are on a device: nothing waits for it, and every number is right."""

import json
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator
from hardware.devices import OnDevice, here

pytestmark = pytest.mark.as_tpu


def logs(folder: str) -> None:
    accelerator = Accelerator(project_dir=folder, log_with="jsonl")
    accelerator.init_trackers("device")
    rank, place = accelerator.process_index, accelerator.device
    weight = torch.ones((), device=place)
    with here().waits() as found:
        for step in range(12):
            loss = weight * step + rank
            half = loss.half()
            accelerator.log({"loss": loss, "nested": {"half": half}, "lr": 0.5, "same": loss}, step=step)
    assert not found or not here().copies_aside, "\n".join(found)
    if accelerator.num_processes > 1:
        with here().waits() as found:
            for reduce in ("mean", "sum", "max", "min", "per_rank"):
                accelerator.log({"loss": weight * 4 + rank, "lr": 0.5}, reduce=reduce)
            accelerator.log({"loss": weight + rank}, reduce="mean", count=weight * (1 - rank))
        waits = [one for one in found if "gloo" not in one]
        assert not waits or not here().copies_aside, "\n".join(waits)
    for step in range(12, 40):  # a device that is far behind is waited for, so that nothing grows
        accelerator.log(
            {"loss": weight * step + rank, "nested": {"half": step}, "lr": 0.5, "same": step}, step=step
        )
    accelerator.end_training()


def lines(folder: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in found if "event" not in line]


def test_numbers_on_a_device_are_logged_without_a_wait(on_device: OnDevice, tmp_path: Path) -> None:
    on_device(logs, str(tmp_path))
    logged = lines(tmp_path)
    assert [line["step"] for line in logged] == list(range(40))
    for step, line in enumerate(logged):
        assert (line["loss"], line["nested"], line["lr"], line["same"]) == (step, {"half": step}, 0.5, step)
    assert [line["time"] for line in logged] == sorted(line["time"] for line in logged)


def test_numbers_of_several_devices_are_reduced_without_a_wait(on_device: OnDevice, tmp_path: Path) -> None:
    on_device(logs, str(tmp_path), num_processes=2)
    mean, total, most, least, each, weighed = lines(tmp_path)[12:18]
    assert [one["loss"] for one in (mean, total, most, least, weighed)] == [4.5, 9.0, 5.0, 4.0, 1.0]
    assert (each["loss/rank_0"], each["loss/rank_1"]) == (4.0, 5.0)
    assert total["lr"] == 1.0
