"""What commands tell of a machine's devices, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import environment_alone

THE_DRIVER = "it is NVIDIA's driver that is asked"


def told(*arguments: str, folder: Path, **variables: str) -> tuple[int, Any]:
    """The exit code of a command, and what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain_launcher", *arguments, "--json"],
        env=environment_alone() | variables,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def checks_of(report: Any) -> dict[str, Any]:
    return {check["name"]: check for check in report["hosts"][0]["checks"]}


def devices_told(folder: Path, visible: str) -> list[str]:
    code, report = told("env", folder=folder, CUDA_VISIBLE_DEVICES=visible)
    assert code == 0
    return report["devices"]


@pytest.mark.slow
def test_no_card_is_told_where_the_variable_hides_all(tmp_path: Path) -> None:
    assert devices_told(tmp_path, "") == ["cpu x 1, fp16 bf16"]


@pytest.mark.only_on("cuda", why="CUDA reads the variable")
@pytest.mark.parametrize("way", ["by number", "by uuid"])
def test_the_card_is_told_that_the_variable_shows(way: str, tmp_path: Path) -> None:
    properties = torch.cuda.get_device_properties(0)
    card, host = devices_told(tmp_path, "0" if way == "by number" else f"GPU-{properties.uuid}")
    memory = f"{properties.total_memory / 2**30:.1f} GiB"
    assert card.startswith(f"cuda x 1, {properties.name}, {memory}, fp16 bf16")
    assert host.startswith("cpu x 1")


@pytest.mark.only_on("cuda", why=THE_DRIVER)
def test_the_doctor_finds_driver_and_library_in_order(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    code, report = told("doctor", "--num-processes", str(count), folder=tmp_path)
    checks = checks_of(report)
    driver, peers = checks["GPU driver"], checks["GPU peer-to-peer"]
    print(driver["summary"], driver["findings"])
    assert driver["summary"].startswith(f"{count} devices, driver ")
    assert f"torch's CUDA {torch.version.cuda}, NCCL " in driver["summary"]
    assert "?" not in driver["summary"]
    assert not [finding for finding in driver["findings"] if finding["severity"] == "error"]
    assert peers["is_skipped"] == (count == 1)
    assert peers["findings"] == []
    assert code == report["is_broken"]


@pytest.mark.only_on("cuda", why=THE_DRIVER)
def test_the_doctor_tells_of_two_ranks_on_one_device(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    code, report = told("doctor", "--num-processes", str(count + 1), folder=tmp_path)
    checks = checks_of(report)
    errors = [each["what"] for each in checks["GPU driver"]["findings"]]
    assert " MB/s, " in checks["gloo between ranks"]["summary"]
    assert f"{count + 1} ranks, and torch sees {count} devices" in errors
    assert code == 1


@pytest.mark.only_on("cuda", why=THE_DRIVER)
def test_the_doctor_tells_of_devices_that_are_hidden(tmp_path: Path) -> None:
    _, report = told("doctor", "--num-processes", "1", folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    hidden = [each["what"] for each in checks_of(report)["variables"]["findings"]]
    assert any(what.startswith("CUDA_VISIBLE_DEVICES='' hides all of this host's") for what in hidden)
