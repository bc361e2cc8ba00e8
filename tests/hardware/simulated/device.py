"""An accelerator that any machine has: torch's open device (PrivateUse1), made by a small C++ extension.

Its memory is the host's and its operations too, but to torch it is a device: tensors are copied to it and from it,
from pinned memory or not, on streams, with events, generators, autocast and collectives of its own. `device.cpp` says
what it does to find those who do not wait. It has the name of a kind that drivetrain knows, and what torch does with
that kind: `NPU`, with side streams, pinned memory and a choice of devices, or `TPU`, without; nothing here is of the
vendors of such.
"""

import fcntl
import importlib.util
import os
import shutil
import sys
import traceback
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hardware.devices import Copies

_NUM_DEVICES = 2
_TORCH = str(Path(torch.__file__).parent)
_HAS_NINJA = shutil.which("ninja") is not None or importlib.util.find_spec("ninja") is not None
CAN_BE_MADE = _HAS_NINJA and shutil.which("c++") is not None
_SOURCES = sorted(Path(__file__).parent.glob("*.?pp"))


def compiled() -> Path:
    """The extension's library, compiled at the first call and kept for what it was compiled from.

    The first call takes a minute; any number of processes may make it, and one of them compiles.
    """
    told = sha256(f"{torch.__version__} {sys.version} {torch.__config__.show()}".encode())
    for source in _SOURCES:
        told.update(source.read_bytes())
    name = f"drivetrain_device_{told.hexdigest()[:12]}"
    library = Path.home() / ".cache" / "drivetrain" / f"{name}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import load

    build = Path(mkdtemp(prefix=library.stem, dir=library.parent))
    sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
    load(library.stem, sources, extra_cflags=["-O0"], build_directory=str(build), is_python_module=False)
    (build / library.name).replace(library)  # at once: a run that is killed leaves no half of it
    shutil.rmtree(build)


@dataclass(frozen=True, slots=True)
class Kind:
    """What the device is played as.

    Attributes:
        name: The kind, as torch names it.
        collectives: What torch calls the collectives of such devices.
        in_order: Whether it executes in the order of the calls, and a process has one device that it does not choose.
    """

    name: str
    collectives: str
    in_order: bool = False


NPU = Kind("npu", "hccl")
TPU = Kind("tpu", "tpu_dist", in_order=True)


@cache
def make(kind: Kind) -> Any:
    """Have this process know the device, for good; what its memory and copies count."""
    library = compiled()
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    if kind.in_order:
        extension.execute_in_order()
    torch.utils.rename_privateuse1_backend(kind.name)
    torch._register_device_module(kind.name, _device_module(extension, kind))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(kind.collectives, _collectives(extension), devices=[kind.name])
    if kind.in_order:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    return extension


def _device_module(extension: Any, kind: Kind) -> ModuleType:
    """What is found as `torch.npu`: what torch asks of a device's module."""

    def generator(device: Any = None) -> torch.Generator:
        index = torch.device(kind.name if device is None else device).index
        return extension.generator(-1 if index is None else index)

    def manual_seed_all(seed: int) -> None:
        for index in range(_NUM_DEVICES):
            generator(torch.device(kind.name, index)).manual_seed(seed)

    def keep_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index not in (None, torch.accelerator.current_device_index()):
            raise ValueError(f"this process has another {kind.name} than {device}")

    module = ModuleType(f"torch.{kind.name}")
    vars(module).update(
        Event=torch.Event,
        Stream=torch.Stream,
        _initialized=True,  # read by torch.utils.checkpoint
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: (
            None
        ),  # without it, torch 2.11 takes the device for unused and does not wait for it
        current_device=torch.accelerator.current_device_index,
        current_stream=torch.accelerator.current_stream,
        device=torch.accelerator.device_index,
        device_count=lambda: _NUM_DEVICES,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_rng_state=lambda device=None: generator(device).get_state(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed=lambda seed: generator().manual_seed(seed),
        manual_seed_all=manual_seed_all,
        set_device=keep_device if kind.in_order else torch.accelerator.set_device_index,
        set_rng_state=lambda state, device=None: generator(device).set_state(state),
        stream=lambda stream: nullcontext() if stream is None else stream,
        synchronize=torch.accelerator.synchronize,
    )
    return module


class SimulatedDevice:
    """The device as the bodies of tests see it; see `hardware.devices.Device`."""

    scale = 1

    def __init__(self, kind: Kind) -> None:
        self._kind, self.name, self.copies_aside = kind, kind.name, not kind.in_order

    def prepare(self) -> None:
        """Have this process know the device."""
        make(self._kind)

    def num_devices(self) -> int:
        """Two."""
        return _NUM_DEVICES

    def collectives(self) -> str:
        """The backends of a group, as `init_process_group` takes them."""
        return f"cpu:gloo,{self.name}:{self._kind.collectives}"

    def waits(self) -> AbstractContextManager[list[str]]:
        """Inside, list where the host waits for the device."""
        return synchronisations(make(self._kind))

    @contextmanager
    def copies(self) -> Generator[Copies]:
        """Inside, count the copies to and from the device."""
        before, found = make(self._kind).counts(), Copies()
        yield found
        after = make(self._kind).counts()
        found.beside = after["deferred"] - before["deferred"]
        found.pageable = after["from_pageable"] - before["from_pageable"]
        found.to_pinned = after["to_pinned"] - before["to_pinned"]
        found.kept = after["used_elsewhere"] - before["used_elsewhere"]

    def bytes_in_use(self) -> int:
        """The bytes of the tensors that are on the device."""
        return make(self._kind).counts()["in_use"]

    @contextmanager
    def limited(self, further_bytes: int) -> Generator[None]:
        """Inside, the device has room for so many bytes more."""
        make(self._kind).set_capacity(self.bytes_in_use() + further_bytes)
        try:
            yield
        finally:
            make(self._kind).set_capacity(2**62)


def _collectives(extension: Any) -> Any:
    def create(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        return extension.collectives(dist.ProcessGroupGloo(store, rank, size, timeout))

    return create


@contextmanager
def synchronisations(extension: Any) -> Generator[list[str]]:
    """Inside, list where the host waits for the device: on what, and the lines that led there, innermost last."""
    found: list[str] = []

    def note(what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_TORCH)]
        lines = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[:-1]]
        found.append(" < ".join([what, *reversed(lines[-4:])]))

    extension.watch(note)
    try:
        yield found
    finally:
        extension.watch(None)
