"""GPUs: the driver against torch's libraries, and peer-to-peer between devices, judged from a probe's answer."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any, cast

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckVerdict, DoctorFinding, error, warning

# The first driver that runs any CUDA of a major version (NVIDIA's table of minor version compatibility).
_FIRST_DRIVERS = {11: "450", 12: "525", 13: "580"}
_MEMORY_TAKEN = 0.5
# The PCI classes of displays and of processing accelerators, and the makers whose devices torch drives.
_GPU_CLASSES = ("0x03", "0x12")
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMeasurement:
    """The answers of a process of its own, which may use the devices.

    Attributes:
        torch_cuda: The CUDA version that torch was built with, such as "12.8"; None for another build.
        torch_hip: The ROCm version that torch was built with; None for another build.
        torch_archs: The architectures that torch has kernels for, such as "sm_90".
        nccl: The version of NCCL (RCCL on AMD); empty if torch has none.
        driver: The version of the driver, such as "550.54.15"; empty if unknown.
        driver_cuda: The newest CUDA that the driver runs, such as "12.4"; empty if unknown.
        library_driver: The version of the driver that its library in user space belongs to; empty if unknown.
        has_nvidia: Whether the NVIDIA driver is loaded.
        has_amd: Whether the AMD driver is loaded.
        on_bus: The makers of the GPUs on the PCI bus, "NVIDIA" or "AMD", whether their driver is loaded or not.
        names: The devices that torch sees.
        capabilities: The compute capability of each, such as "9.0".
        memory_taken: The part of each device's memory that other processes hold, from 0 to 1.
        refusal: The reason why torch sees no device, in its words.
        peers: For each ordered pair "0-1" of devices: "yes", "no", or "wrong data" if a copy arrived changed.
    """

    torch_cuda: str | None = None
    torch_hip: str | None = None
    torch_archs: tuple[str, ...] = ()
    nccl: str = ""
    driver: str = ""
    driver_cuda: str = ""
    library_driver: str = ""
    has_nvidia: bool = False
    has_amd: bool = False
    on_bus: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    memory_taken: tuple[float, ...] = ()
    refusal: str = ""
    peers: Mapping[str, str] | None = None

    def as_data(self) -> dict[str, Any]:
        """Return the measurement as plain JSON data."""
        return asdict(self)


def measure_gpus(environment: Mapping[str, str], *, timeout_seconds: float) -> GpuMeasurement:
    """Ask a process of its own, since a sick driver may hang it.

    Raises:
        OSError: The process failed; the message has its last line.
        TimeoutError: It did not answer in time.
    """
    command = [sys.executable, "-m", "drivetrain_doctor.host.gpu_probe"]
    try:
        done = subprocess.run(
            command,
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
    return gpus_from_data(json.loads(done.stdout.splitlines()[-1]))


def find_gpus(*, system: Path = Path("/sys"), torch_folder: Path | None = None) -> GpuMeasurement:
    """Return what is known without torch's import where no driver is loaded: torch's build, and GPUs on the bus.

    Args:
        system: The folder of the kernel's view of devices.
        torch_folder: The folder of the package torch; None for the one that is installed.
    """
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
        torch_cuda=build.get("cuda"), torch_hip=build.get("hip"), on_bus=tuple(sorted(makers - {""}))
    )


def gpus_from_data(data: Mapping[str, Any]) -> GpuMeasurement:
    """Return the measurement that `as_data` wrote."""
    values: dict[str, Any] = {
        field.name: data[field.name] for field in fields(GpuMeasurement) if field.name in data
    }
    for name, value in values.items():
        values[name] = tuple(cast("list[Any]", value)) if isinstance(value, list) else value
    return GpuMeasurement(**values)


def judge_driver(measured: GpuMeasurement, checked: CheckedRun) -> CheckVerdict:
    """Judge the driver against torch's libraries."""
    if not measured.has_nvidia and not measured.has_amd:
        return _without_driver(measured)
    findings = [*_build(measured), *_nvidia(measured), *_devices(measured, checked)]
    if measured.has_nvidia:
        library = f"torch's CUDA {measured.torch_cuda or 'none'}, NCCL {measured.nccl or 'none'}"
        driver = f"driver {measured.driver or '?'} (up to CUDA {measured.driver_cuda or '?'})"
    else:
        library = f"torch's ROCm {measured.torch_hip or 'none'}, RCCL {measured.nccl or 'none'}"
        driver = f"AMD driver {measured.driver or 'of the kernel'}"
    summary = f"{len(measured.names)} devices, {driver}, {library}"
    return CheckVerdict(summary=summary, findings=tuple(findings))


def _without_driver(measured: GpuMeasurement) -> CheckVerdict:
    build = f"torch is built for {_built_for(measured)}"
    maker = "NVIDIA" if measured.torch_cuda else "AMD" if measured.torch_hip else ""
    if maker not in measured.on_bus:
        return CheckVerdict(skipped=f"no GPU driver is loaded, and {build}")
    lost = error(
        f"this host has {maker} GPUs and no driver for them is loaded; {build}",
        why="torch sees no device: the run trains on the CPU, or ends at once",
        mend=f"modprobe {'nvidia' if maker == 'NVIDIA' else 'amdgpu'} tells why it does not load; after an update of "
        "the kernel or the driver, reboot or install the driver for the kernel that runs (dkms status)",
    )
    return CheckVerdict(summary=f"no driver; {build}", findings=(lost,))


def _built_for(measured: GpuMeasurement) -> str:
    if measured.torch_cuda:
        return f"CUDA {measured.torch_cuda}"
    return f"ROCm {measured.torch_hip}" if measured.torch_hip else "the CPU"


def _build(measured: GpuMeasurement) -> list[DoctorFinding]:
    kind, built = ("NVIDIA", measured.torch_cuda) if measured.has_nvidia else ("AMD", measured.torch_hip)
    if built is not None:
        return []
    index = "cu128" if kind == "NVIDIA" else "rocm6.4"
    return [
        error(
            f"this host has {kind} GPUs, and torch is built for {_built_for(measured)}",
            why="the run trains on the CPU",
            mend=f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}",
        )
    ]


def _nvidia(measured: GpuMeasurement) -> list[DoctorFinding]:
    if not measured.has_nvidia or measured.torch_cuda is None:
        return []
    if measured.driver and measured.library_driver and measured.driver != measured.library_driver:
        return [
            error(
                f"the driver in the kernel is {measured.driver}, its library is {measured.library_driver}",
                why="'Driver/library version mismatch': the package was updated, and the old module still runs",
                mend="reboot, or as root unload and load the modules (rmmod nvidia_uvm nvidia; modprobe nvidia)",
            )
        ]
    if not measured.driver_cuda:
        return []
    runs, built = _numbers(measured.driver_cuda), _numbers(measured.torch_cuda)
    if runs[0] < built[0]:
        first = _FIRST_DRIVERS.get(built[0], f"one for CUDA {built[0]}")
        return [
            error(
                f"torch's CUDA is {measured.torch_cuda}; the driver {measured.driver} runs up to "
                f"{measured.driver_cuda}",
                why="'The NVIDIA driver on your system is too old': torch sees no device",
                mend=f"install driver {first} or newer, or a torch for CUDA {runs[0]} (pip install torch --index-url "
                f"https://download.pytorch.org/whl/cuNNN, with NNN up to {measured.driver_cuda.replace('.', '')})",
            )
        ]
    if runs < built:
        return [
            warning(
                f"torch's CUDA is {measured.torch_cuda}; the driver {measured.driver} runs up to "
                f"{measured.driver_cuda}",
                why="compiled kernels run (minor version compatibility), but what is compiled at run time to "
                "PTX does not: 'unsupported PTX version', for example from Triton or torch.compile",
                mend=f"a driver for CUDA {measured.torch_cuda}, or a torch for CUDA {measured.driver_cuda}",
            )
        ]
    return []


def _devices(measured: GpuMeasurement, checked: CheckedRun) -> list[DoctorFinding]:
    findings: list[DoctorFinding] = []
    if not measured.names and (measured.torch_cuda or measured.torch_hip):
        findings.append(
            error(
                f"the driver is loaded, and torch sees no device: {measured.refusal or 'it gives no reason'}",
                why="the run trains on the CPU, or ends at once",
                mend="nvidia-smi (rocminfo on AMD) tells whether the driver works; docker run --gpus all shows the "
                "devices to a container; unset CUDA_VISIBLE_DEVICES",
            )
        )
    if 0 < len(measured.names) < checked.processes_per_node and checked.accelerator is not None:
        findings.append(
            error(
                f"{checked.processes_per_node} ranks, and torch sees {len(measured.names)} devices",
                why="two ranks on one GPU: NCCL refuses ('Duplicate GPU detected')",
                mend=f"--num-processes {len(measured.names) * checked.num_nodes}",
            )
        )
    archs = [_architecture(each) for each in measured.torch_archs if each.startswith(("sm_", "compute_"))]
    for index, capability in enumerate(measured.capabilities if archs and not measured.torch_hip else ()):
        if not _has_kernels(capability, measured.torch_archs):
            findings.append(
                error(
                    f"GPU {index} ({measured.names[index]}) has compute capability {capability}; torch has kernels "
                    f"for {', '.join(measured.torch_archs)}",
                    why="'no kernel image is available for execution on the device'",
                    mend="install a newer torch for a new GPU (an older one for an old GPU)",
                )
            )
    for index, taken in enumerate(measured.memory_taken):
        if taken > _MEMORY_TAKEN:
            findings.append(
                warning(
                    f"other processes hold {taken:.0%} of the memory of GPU {index}",
                    why="the run goes out of memory on this rank",
                    mend="nvidia-smi names them; end what a killed run left behind, or leave the device out "
                    "(--devices)",
                )
            )
    return findings


def _has_kernels(capability: str, archs: tuple[str, ...]) -> bool:
    """Return whether torch runs on a device: compiled for its major version, or as PTX for an older one."""
    device = _numbers(capability)
    for arch in archs:
        built = _architecture(arch)
        if arch.startswith("sm_") and built[0] == device[0] and built <= device:
            return True
        if arch.startswith("compute_") and built <= device:
            return True
    return False


def _architecture(arch: str) -> tuple[int, ...]:
    """Return (9, 0) for "sm_90" or "sm_90a"."""
    digits = "".join(each for each in arch.partition("_")[2] if each.isdecimal())
    return (int(digits[:-1] or 0), int(digits[-1:] or 0))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def judge_peers(measured: GpuMeasurement) -> CheckVerdict:
    """Judge the copies from each GPU to each other one."""
    if measured.peers is None or len(measured.names) < 2:
        return CheckVerdict(skipped=f"peer-to-peer needs two GPUs, and there are {len(measured.names)}")
    wrong = [pair for pair, answer in measured.peers.items() if answer == "wrong data"]
    without = [pair for pair, answer in measured.peers.items() if answer == "no"]
    findings: list[DoctorFinding] = []
    if wrong:
        findings.append(
            error(
                f"copies between GPUs {', '.join(wrong)} arrive changed",
                why="the system says that peer-to-peer works, and it does not: training diverges or hangs. An "
                "IOMMU or PCIe access control (ACS) between the devices does this",
                mend="disable the IOMMU and ACS in the firmware, or boot with iommu=pt; until then export "
                "NCCL_P2P_DISABLE=1",
                pairs=", ".join(wrong),
            )
        )
    if without:
        is_all = len(without) == len(measured.peers)
        having = "no two GPUs have" if is_all else f"GPUs {', '.join(without)} have no"
        findings.append(
            warning(
                f"{having} peer-to-peer",
                why="what they exchange passes through the host's memory, at a fraction of the speed",
                mend="nvidia-smi topo -p2p r tells why; in a virtual machine the host must allow it; consumer cards "
                "have none",
                pairs=", ".join(without),
            )
        )
    return CheckVerdict(summary=f"{len(measured.peers)} ordered pairs of GPUs", findings=tuple(findings))
