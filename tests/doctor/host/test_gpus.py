from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drivetrain_config.environ import child_environment
from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_doctor.host.gpus import (
    GpuMeasurement,
    find_gpus,
    judge_driver,
    judge_peers,
    measure_gpus,
)

HEALTHY = GpuMeasurement(
    torch_cuda="12.8",
    nccl="2.27.3",
    driver="570.86.15",
    driver_cuda="12.8",
    library_driver="570.86.15",
    has_nvidia=True,
    names=("H100", "H100"),
    memory_taken=(0.01, 0.02),
    peers={"0-1": "yes", "1-0": "yes"},
)


AMD = GpuMeasurement(has_amd=True, torch_hip="6.4.1", nccl="2.22.3", names=("MI300X", "MI300X"))


@pytest.mark.parametrize(
    ("measured", "summary"),
    [
        (HEALTHY, "2 devices, driver 570.86.15 (up to CUDA 12.8), torch's CUDA 12.8, NCCL 2.27.3"),
        (AMD, "2 devices, AMD driver of the kernel, torch's ROCm 6.4.1, RCCL 2.22.3"),
    ],
)
def test_a_driver_that_fits_has_no_finding(measured: GpuMeasurement, summary: str) -> None:
    report = judge_driver(measured)
    assert (report.findings, report.summary) == ([], summary)


@pytest.mark.parametrize(
    ("build", "devices", "skipped", "found"),
    [
        ("cuda = hip = None", [], "no GPU driver is loaded, and torch is built for the CPU", None),
        ("cuda, hip = '13.2', None", [], "no GPU driver is loaded, and torch is built for CUDA 13.2", None),
        ("cuda, hip = '13.2', None", [("0x10de", "0x040300")], "no GPU driver is loaded, and torch is built", None),
        ("cuda, hip = '13.2', None", [("0x1a03", "0x030000")], "no GPU driver is loaded, and torch is built", None),
        ("cuda, hip = None, '7.0'", [("0x10de", "0x030000")], "no GPU driver is loaded, and torch is built", None),
        (
            "cuda, hip = '13.2', None", [("0x1a03", "0x030000"), ("0x10de", "0x030200")], "",
            "this host has NVIDIA GPUs and no driver for them is loaded; torch is built for CUDA 13.2",
        ),
        (
            "cuda, hip = None, '7.0'", [("0x1002", "0x120000")], "",
            "this host has AMD GPUs and no driver for them is loaded; torch is built for ROCm 7.0",
        ),
    ],
)  # fmt: skip
def test_without_a_driver_the_build_of_torch_is_told_and_a_lost_driver_is_an_error(
    tmp_path: Path, build: str, devices: list[tuple[str, str]], skipped: str, found: str | None
) -> None:
    (tmp_path / "version.py").write_text(build)
    for number, (vendor, kind) in enumerate(devices):
        device = tmp_path / f"bus/pci/devices/0000:00:0{number}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    report = judge_driver(find_gpus(system=tmp_path, torch_folder=tmp_path))
    assert skipped in (report.summary if report.is_skipped else "")
    assert [(each.severity, each.what) for each in report.findings] == ([("error", found)] if found else [])


def test_the_build_of_the_installed_torch_is_read_without_importing_it() -> None:
    found = find_gpus()
    assert (found.torch_cuda, found.torch_hip) == (torch.version.cuda, torch.version.hip)


REFUSAL = "CUDA initialization: no CUDA-capable device"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"driver_cuda": "12.4"},
            [("warning", "torch is built for CUDA 12.8, and driver 570.86.15 runs CUDA up to 12.4")],
        ),
        ({"driver_cuda": "13.0"}, []),
        ({"torch_cuda": "13.0"}, []),  # torch itself says that the driver is too old
        (
            {"library_driver": "575.51.03"},
            [("error", "the driver in the kernel has version 570.86.15, its library version 575.51.03")],
        ),
        (
            {"names": (), "memory_taken": (), "refusal": REFUSAL},
            [("error", f"the driver is loaded, and torch sees no device: {REFUSAL}")],
        ),
        ({"memory_taken": (0.0, 0.93)}, [("warning", "other processes hold 93% of the memory of GPU 1")]),
    ],
)
def test_a_driver_that_does_not_fit(changes: dict[str, object], found: list[tuple[str, str]]) -> None:
    report = judge_driver(replace(HEALTHY, **changes))  # type: ignore[arg-type]
    assert [(each.severity, each.what) for each in report.findings] == found


@pytest.mark.parametrize(("loaded", "kind"), [("has_nvidia", "NVIDIA"), ("has_amd", "AMD")])
def test_torch_for_the_cpu_on_a_host_with_gpus(loaded: str, kind: str) -> None:
    (finding,) = judge_driver(GpuMeasurement(**{loaded: True})).findings  # type: ignore[arg-type]
    assert finding.what == f"this host has {kind} GPUs, and torch is built for the CPU"
    assert "download.pytorch.org" in finding.repair


@pytest.mark.parametrize(
    ("peers", "severity", "what", "repair"),
    [
        ({"0-1": "wrong data", "1-0": "yes"}, "error", "copies between GPUs 0-1 arrive changed",
         "NCCL_P2P_DISABLE=1"),
        ({"0-1": "no", "1-0": "no"}, "warning", "no two GPUs have peer-to-peer", "nvidia-smi topo -p2p r"),
    ],
)  # fmt: skip
def test_peer_to_peer_that_is_missing_or_changes_data(
    peers: dict[str, str], severity: str, what: str, repair: str
) -> None:
    (finding,) = judge_peers(replace(HEALTHY, peers=peers)).findings
    assert (finding.severity, finding.what) == (severity, what)
    assert repair in finding.repair


def test_peer_to_peer_needs_two_gpus() -> None:
    assert judge_peers(HEALTHY).findings == []
    skipped = CheckReport("needs two GPUs, and there are 0", is_skipped=True)
    assert judge_peers(GpuMeasurement()) == skipped


@pytest.mark.slow
def test_the_probe_runs_on_this_machine() -> None:
    measured = measure_gpus(child_environment(), timeout_seconds=150)
    assert len(measured.names) == len(measured.memory_taken)
