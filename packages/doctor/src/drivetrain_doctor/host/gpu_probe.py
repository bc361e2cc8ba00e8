"""Ask the driver and torch about GPUs, in a separate process.

The process is `python -m drivetrain_doctor.host.gpu_probe`, and prints one line of JSON. The probe calls
`torch.version`, `torch.cuda`, and `cuDriverGetVersion` of the CUDA driver.
"""

import ctypes
import json
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from itertools import permutations
from pathlib import Path

import torch

from drivetrain_doctor.host.gpus import GpuMeasurement

_COPY_BYTES = 1 << 20


def probe(proc: Path = Path("/proc"), system: Path = Path("/sys")) -> GpuMeasurement:
    """Ask the driver and torch about the GPUs; on a machine without GPUs, return only the installed versions."""
    nvidia, amd = proc / "driver/nvidia/version", system / "module/amdgpu"
    count, refusal, nccl, driver = 0, "", "", ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if (torch.version.cuda or torch.version.hip) and torch.cuda.is_available():
            count = torch.cuda.device_count()
        else:
            refusal = " ".join(str(each.message).partition("\n")[0] for each in told[:1])
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, import_module("torch.cuda.nccl").version()))
    if nvidia.exists():
        found_version = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", nvidia.read_text())
        driver = found_version.group(1) if found_version else ""
    elif (amd / "version").exists():  # AMD's packages have one, the kernel's own driver has none
        driver = (amd / "version").read_text().strip()
    driver_cuda = ""
    with suppress(OSError):  # there is no such library
        version = ctypes.c_int()
        if not ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):  # 0 is success
            driver_cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    # NVIDIA's library in user space is named by the version of the driver that it belongs to.
    folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
    links = [link for folder in folders if (link := Path(folder) / "libcuda.so.1").is_symlink()]
    peers: dict[str, str] = {}
    for sender, receiver in permutations(range(count), 2):
        sent = torch.arange(_COPY_BYTES // 8, device=f"cuda:{sender}")
        is_right = torch.equal(sent.to(f"cuda:{receiver}").cpu(), sent.cpu())
        answer = "yes" if torch.cuda.can_device_access_peer(sender, receiver) else "no"
        peers[f"{sender}-{receiver}"] = answer if is_right else "wrong data"
    return GpuMeasurement(
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        nccl=nccl,
        driver=driver,
        driver_cuda=driver_cuda,
        library_driver=links[0].resolve().name.removeprefix("libcuda.so.") if links else "",
        has_nvidia=nvidia.exists() or Path("/dev/dxg").exists(),
        has_amd=amd.is_dir() and Path("/dev/kfd").exists(),
        names=[torch.cuda.get_device_name(index) for index in range(count)],
        memory_taken=[1 - free / total for free, total in map(torch.cuda.mem_get_info, range(count))],
        refusal=refusal,
        peers=peers or None,
    )


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(asdict(probe()))}\n")
