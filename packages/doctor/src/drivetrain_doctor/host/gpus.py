"""GPUs: the driver against torch's libraries, and peer-to-peer between devices, judged from a probe's answer."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

from drivetrain_doctor.doctor_finding import CheckReport

_MEMORY_TAKEN = 0.5
# The PCI classes of displays and of processing accelerators, and the makers whose devices torch drives.
_GPU_CLASSES = ("0x03", "0x12")
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMeasurement:
    """The answers of the probe, a separate process that may use the devices.

    Attributes:
        torch_cuda, torch_hip: The CUDA or ROCm version that torch was built with, such as "12.8"; None for another.
        nccl: The version of NCCL (RCCL on AMD); empty if torch has none.
        driver_cuda: The newest CUDA version that the driver runs, such as "12.4"; empty if unknown.
        library_driver: The version of the driver that its library in user space belongs to; empty if unknown.
        has_nvidia, has_amd: Whether the maker's driver is loaded.
        on_bus: The makers of the GPUs on the PCI bus, "NVIDIA" or "AMD", with or without a loaded driver.
        names: The devices that torch sees.
        memory_taken: The part of each device's memory that other processes hold, from 0 to 1.
        refusal: The reason why torch sees no device, in torch's words.
        peers: For each ordered pair "0-1" of devices: "yes", "no", or "wrong data" if a copy arrived changed.
    """

    torch_cuda: str | None = None
    torch_hip: str | None = None
    nccl: str = ""
    driver: str = ""
    driver_cuda: str = ""
    library_driver: str = ""
    has_nvidia: bool = False
    has_amd: bool = False
    on_bus: Sequence[str] = ()
    names: Sequence[str] = ()
    memory_taken: Sequence[float] = ()
    refusal: str = ""
    peers: Mapping[str, str] | None = None


def measure_gpus(environment: Mapping[str, str], *, timeout_seconds: float) -> GpuMeasurement:
    """Run the probe in a process, since a sick driver may hang; an OSError or TimeoutError tells of a failure."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain_doctor.host.gpu_probe"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise TimeoutError(f"the driver did not answer within {timeout_seconds:g} s") from late
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise OSError(f"the process that asks the driver ended with {done.returncode}: {last[0]}")
    return GpuMeasurement(**json.loads(done.stdout.splitlines()[-1]))


def find_gpus(*, system: Path = Path("/sys"), torch_folder: Path | None = None) -> GpuMeasurement:
    """Find torch's build and the GPUs on the bus without importing torch, for a host without a loaded driver."""
    if torch_folder is None:
        found = find_spec("torch")
        torch_folder = None if found is None or found.origin is None else Path(found.origin).parent
    build = {} if torch_folder is None else run_path(str(torch_folder / "version.py"))
    makers: set[str] = set()
    for device in (system / "bus/pci/devices").glob("*"):
        with suppress(OSError):  # it was taken out
            if (device / "class").read_text().startswith(_GPU_CLASSES):
                makers.add(_MAKERS.get((device / "vendor").read_text().strip(), ""))
    return GpuMeasurement(
        torch_cuda=build.get("cuda"), torch_hip=build.get("hip"), on_bus=sorted(makers - {""})
    )


def judge_driver(measured: GpuMeasurement) -> CheckReport:
    """Judge the driver against torch's libraries."""
    toolkit = f"ROCm {measured.torch_hip}" if measured.torch_hip else "the CPU"
    built_for = f"torch is built for {f'CUDA {measured.torch_cuda}' if measured.torch_cuda else toolkit}"
    if not measured.has_nvidia and not measured.has_amd:
        maker, module = ("NVIDIA", "nvidia") if measured.torch_cuda else ("AMD", "amdgpu")
        if maker not in measured.on_bus or not (measured.torch_cuda or measured.torch_hip):
            return CheckReport(f"no GPU driver is loaded, and {built_for}", is_skipped=True)
        report = CheckReport(f"no driver; {built_for}")
        report.error(
            f"this host has {maker} GPUs and no driver for them is loaded; {built_for}",
            why="torch sees no device: the run trains on the CPU, or ends at once",
            repair=f"modprobe {module} tells why it does not load; after an update of the kernel or the driver, "
            "reboot or install the driver for the kernel that runs (dkms status)",
        )
        return report
    cuda, rocm, nccl = (each or "none" for each in (measured.torch_cuda, measured.torch_hip, measured.nccl))
    if measured.has_nvidia:
        kind, build, index = "NVIDIA", measured.torch_cuda, "cu128"
        driver = f"driver {measured.driver or '?'} (up to CUDA {measured.driver_cuda or '?'})"
        library = f"torch's CUDA {cuda}, NCCL {nccl}"
    else:
        kind, build, index = "AMD", measured.torch_hip, "rocm6.4"
        driver = f"AMD driver {measured.driver or 'of the kernel'}"
        library = f"torch's ROCm {rocm}, RCCL {nccl}"
    report = CheckReport(f"{len(measured.names)} devices, {driver}, {library}")
    if measured.has_nvidia and build is not None:
        _judge_nvidia(report, measured, build)
    if build is None:
        report.error(
            f"this host has {kind} GPUs, and {built_for}",
            why="the run trains on the CPU",
            repair=f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}",
        )
    if not measured.names and (measured.torch_cuda or measured.torch_hip):
        report.error(
            f"the driver is loaded, and torch sees no device: {measured.refusal or 'torch gives no reason'}",
            why="the run trains on the CPU, or ends at once",
            repair="nvidia-smi (rocminfo on AMD) tells whether the driver works; docker run --gpus all shows the "
            "devices to a container; unset CUDA_VISIBLE_DEVICES",
        )
    for device, taken in enumerate(measured.memory_taken):
        if taken > _MEMORY_TAKEN:
            report.warning(
                f"other processes hold {taken:.0%} of the memory of GPU {device}",
                why="the run goes out of memory on this rank",
                repair="nvidia-smi names them; end those that a killed run left, or leave the device out (--devices)",
            )
    return report


def _judge_nvidia(report: CheckReport, measured: GpuMeasurement, cuda: str) -> None:
    driver, library = measured.driver, measured.library_driver
    if driver and library and driver != library:
        report.error(
            f"the driver in the kernel has version {driver}, its library version {library}",
            why="'Driver/library version mismatch': the package was updated, and the old module still runs",
            repair="reboot, or as root unload and load the modules (rmmod nvidia_uvm nvidia; modprobe nvidia)",
        )
    elif measured.driver_cuda:
        runs, built = (tuple(map(int, each.split(".")[:2])) for each in (measured.driver_cuda, cuda))
        # Of a driver for an older major version, torch itself says that it is too old.
        if runs[0] == built[0] and runs < built:
            report.warning(
                f"torch is built for CUDA {cuda}, and driver {driver} runs CUDA up to {measured.driver_cuda}",
                why="torch's own kernels run (minor version compatibility), but kernels compiled at run time, as by "
                "Triton or torch.compile, fail: 'unsupported PTX version'",
                repair=f"install a driver for CUDA {cuda}, or a torch for CUDA {measured.driver_cuda}",
            )


def judge_peers(measured: GpuMeasurement) -> CheckReport:
    """Judge the copies from each GPU to each other one."""
    if measured.peers is None or len(measured.names) < 2:
        return CheckReport(f"needs two GPUs, and there are {len(measured.names)}", is_skipped=True)
    wrong, without = (
        ", ".join(pair for pair, answer in measured.peers.items() if answer == wanted)
        for wanted in ("wrong data", "no")
    )
    report = CheckReport(f"{len(measured.peers)} ordered pairs of GPUs")
    if wrong:
        report.error(
            f"copies between GPUs {wrong} arrive changed",
            why="the driver reports that peer-to-peer works, but it does not: training diverges or hangs. An "
            "IOMMU or PCIe access control (ACS) between the devices does this",
            repair="disable the IOMMU and ACS in the firmware, or boot with iommu=pt; until then export "
            "NCCL_P2P_DISABLE=1",
            pairs=wrong,
        )
    if without:
        is_all = set(measured.peers.values()) == {"no"}
        report.warning(
            f"{'no two GPUs have' if is_all else f'GPUs {without} have no'} peer-to-peer",
            why="their messages pass through the host's memory, at a fraction of the speed",
            repair="nvidia-smi topo -p2p r tells why; in a virtual machine the host must allow it; consumer cards "
            "have none",
            pairs=without,
        )
    return report
