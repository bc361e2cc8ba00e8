"""The memory of activations: tensors that a forward saves for the backward, by the module that saves them."""

import threading
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import nn

from drivetrain_memory.storages import LiveStorage, storages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """The activations of a block.

    Attributes:
        peak_bytes: The most bytes that were saved at one time, over all devices.
        held_bytes: The bytes that are still saved; after the block, the bytes that a later backward needs.
        peak_by_device: The bytes on each device at the time of the peak.
        by_module: The peak of each module by name, whenever it was; "" is for tensors saved outside any module.
    """

    peak_bytes: int
    held_bytes: int
    peak_by_device: Mapping[str, int]
    by_module: Mapping[str, int]


class ActivationRecorder:
    """A counter of saved tensors, made by `record_activations`. A storage counts once, until no graph holds it."""

    def __init__(self, model: nn.Module) -> None:
        tensors = (*model.parameters(), *model.buffers())
        self._model_storages = {storage for tensor in tensors for storage in storages_of(tensor)}
        self._lock = threading.RLock()  # a graph is freed in autograd's threads, and at any allocation
        self._modules: list[str] = []
        self._holders: dict[LiveStorage, int] = defaultdict(int)
        self._owners: dict[LiveStorage, str] = {}
        self._held = 0
        self._peak = 0
        self._by_device: dict[str, int] = defaultdict(int)
        self._peak_by_device: dict[str, int] = {}
        self._by_module: dict[str, int] = defaultdict(int)
        self._peak_by_module: dict[str, int] = defaultdict(int)

    def memory(self) -> ActivationMemory:
        """Return the memory of the tensors saved so far."""
        with self._lock:
            return ActivationMemory(
                peak_bytes=self._peak,
                held_bytes=self._held,
                peak_by_device=dict(self._peak_by_device),
                by_module=dict(self._peak_by_module),
            )

    def enter(self, name: str, *_: object) -> None:
        """Note that a module's forward begins."""
        self._modules.append(name)

    def leave(self, *_: object) -> None:
        """Note that a module's forward ended."""
        self._modules.pop()

    def pack(self, tensor: torch.Tensor) -> "_Saved":
        """Count a tensor that autograd saves."""
        counted = [storage for storage in storages_of(tensor) if storage not in self._model_storages]
        with self._lock:
            for storage in counted:
                self._holders[storage] += 1
                if self._holders[storage] == 1:
                    self._owners[storage] = self._modules[-1] if self._modules else ""
                    self._change(storage, storage.size_bytes)
        return _Saved(self, tensor, counted)

    def release(self, counted: list[LiveStorage]) -> None:
        """Take the storages of a saved tensor off the count."""
        with self._lock:
            for storage in counted:
                self._holders[storage] -= 1
                if not self._holders[storage]:
                    self._change(storage, -storage.size_bytes)
                    del self._holders[storage], self._owners[storage]

    def _change(self, storage: LiveStorage, added_bytes: int) -> None:
        owner = self._owners[storage]
        self._held += added_bytes
        self._by_device[storage.device] += added_bytes
        self._by_module[owner] += added_bytes
        self._peak_by_module[owner] = max(self._peak_by_module[owner], self._by_module[owner])
        if self._held > self._peak:
            self._peak, self._peak_by_device = self._held, dict(self._by_device)


@dataclass(slots=True, eq=False)
class _Saved:
    """A saved tensor in a graph; the tensor counts as long as the graph holds this object."""

    recorder: ActivationRecorder
    tensor: torch.Tensor
    counted: list[LiveStorage]

    def __del__(self) -> None:
        self.recorder.release(self.counted)


@contextmanager
def record_activations(model: nn.Module) -> Generator[ActivationRecorder]:
    """Measure the tensors that forwards save for their backward, by the module that saves them.

    Parameters and buffers of the model are not counted. A saved tensor costs some 10 us, so measure one step, not
    all. Tensors of compiled code count for the module whose forward was compiled; under activation checkpointing only
    inputs count. Forwards of several threads are counted together, and their modules are mixed up. Within the block,
    all modules of the model have hooks.

    Example:
        >>> model = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
        >>> with record_activations(model) as recorder:
        ...     loss = model(torch.ones(5, 10)).sum()
        >>> recorder.memory().peak_bytes  # the input of the layer, and the output of ReLU
        600
    """
    recorder = ActivationRecorder(model)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(recorder.enter, name)).remove)
            # `always_call`: a forward that raises has left the module too.
            stack.callback(module.register_forward_hook(recorder.leave, always_call=True).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.pack, attrgetter("tensor")))
        yield recorder
