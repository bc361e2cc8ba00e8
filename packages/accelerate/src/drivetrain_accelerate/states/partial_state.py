"""The rank and device of this process, shared in the whole process: a view of one `drivetrain_state.Context`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import wraps
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from drivetrain_accelerate.environment_variables import says_yes
from drivetrain_accelerate.plugins.enums import TYPE_BY_DEVICE, DistributedType
from drivetrain_config import resolve
from drivetrain_state import Context, StateSettings, best_device_kind, connect
from drivetrain_state.collectives import control
from drivetrain_state.collectives import operations as collectives


class SharedState:
    """A base class whose instances share all attributes until a reset; each subclass has a dict of its own."""

    _shared_state: ClassVar[dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a view of the shared attributes."""
        view = super().__new__(cls)
        view.__dict__ = cls._shared_state
        return view

    def __reduce__(self) -> Any:
        # A copy or pickle is a view of the process that reads it: a group and its threads belong to one process, and
        # transformers pickles its arguments with the state that they hold.
        return SharedState.__new__, (type(self),)

    @property
    def initialized(self) -> bool:
        """True if an instance was constructed since the start or the last reset."""
        return bool(self._shared_state)

    @classmethod
    def _reset_state(cls) -> None:
        """Forget all attributes; tests call this between runs."""
        cls._shared_state.clear()


class RankControl:
    """Methods for ranks to wait for each other and to run code on some of them."""

    context: Context
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int

    @property
    def use_distributed(self) -> bool:
        """True if there are several ranks."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def is_last_process(self) -> bool:
        """True if this process has the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def is_main_process(self) -> bool:
        """True if this process is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True if this process is rank 0 of its node."""
        return self.local_process_index == 0

    def wait_for_everyone(self) -> None:
        """Wait until every rank has reached this call. Called on all ranks."""
        collectives.barrier(self.context)

    def split_between_processes(
        self, inputs: list[Any] | tuple[Any, ...] | dict[str, Any] | torch.Tensor, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Run the block with this rank's share of a list, tuple, dict of lists or tensor."""
        return control.split_between_processes(self.context, inputs, apply_padding=apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0 before the other ranks. Called on all ranks."""
        return control.main_process_first(self.context)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0 of each node before the node's other ranks. Called on all ranks."""
        return control.local_main_process_first(self.context)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function so that it runs on rank 0 only and returns None elsewhere."""
        return self._decorate_for(function, is_chosen=self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function so that it runs on rank 0 of each node only."""
        return self._decorate_for(function, is_chosen=self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs on the highest rank only."""
        return self._decorate_for(function, is_chosen=self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function so that it runs on one rank only. With a single process, it always runs."""
        if self.num_processes > 1:
            if process_index is None:
                raise ValueError("on_process(process_index=None): say the rank that runs the function")
            collectives.check_rank(self.context, process_index, "index")
        return self._decorate_for(function, is_chosen=self.process_index == process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function so that it runs on one rank of each node. With a single process, it always runs."""
        if self.num_processes > 1 and local_process_index is None:
            raise ValueError("on_local_process(local_process_index=None): say the rank on each node")
        return self._decorate_for(function, is_chosen=self.local_process_index == local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first rank of each node, as `print` does."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 what the program asked for

    def _decorate_for(self, function: Callable[..., Any] | None, *, is_chosen: bool) -> Callable[..., Any]:
        """Return the function if `is_chosen`, else one that does nothing; without a function, return a decorator."""

        def decorate(chosen: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(chosen)
            def run_if_chosen(*args: Any, **kwargs: Any) -> Any:
                return chosen(*args, **kwargs) if is_chosen else None

            return chosen if self.num_processes == 1 else run_if_chosen

        return decorate if function is None else decorate(function)


class PartialState(SharedState, RankControl):
    """The rank and the device of this process. The first instance connects the ranks. Called on all ranks.

    Keyword arguments are those of `init_process_group`; `backend` and `init_method` must fit the launcher's group.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    backend: str | None
    debug: bool
    fork_launched = False  # drivetrain's launchers start fresh interpreters

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        if self.initialized:
            return
        known = {"timeout", "backend", "init_method", "use_deepspeed"}
        if unknown := sorted(name for name in kwargs if name not in known and not name.startswith("_")):
            raise TypeError(f"PartialState() got {unknown[0]}=; it takes cpu, {', '.join(sorted(known))}")
        timeout: timedelta | None = kwargs.get("timeout")
        said = {} if timeout is None else {"timeout_seconds": timeout.total_seconds()}
        settings = resolve(StateSettings, section="state", code=said).value
        context = connect(settings, device="cpu" if cpu or asks_for_cpu() else None)
        topology = context.topology
        self._cpu, self.debug = cpu, settings.debug
        self.context, self.device = context, context.device
        self.backend = dist.get_backend() if context.group is not None else None
        self.distributed_type = (
            DistributedType.NO if topology.world_size == 1 else distributed_type_on(context.device.type)
        )
        self.num_processes, self.process_index = topology.world_size, topology.rank
        self.local_process_index = topology.local_rank

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\nNum processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\nLocal process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and not self.initialized:
            raise AttributeError(
                f"PartialState has no attribute {name!r} before an Accelerator() or PartialState() is constructed, "
                "or after _reset_state()"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def _reset_state(cls) -> None:
        context: Context | None = cls._shared_state.get("context")
        super()._reset_state()
        if context is not None:
            context.close()

    @property
    def default_device(self) -> torch.device:
        """The best available kind of device, whether or not this process uses it."""
        return torch.device(best_device_kind())

    def set_device(self) -> None:
        """Do nothing: torch's current device was set when the ranks connected."""

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy a process group, by default all. With a single process, do nothing."""
        if group is None and self.context.owns_group:
            self.context.close()
        elif group is not None or dist.is_initialized():
            dist.destroy_process_group(group)


def current_context() -> Context:
    """Return the context of this process. The first call connects the ranks, and is made on all ranks."""
    return PartialState().context


def is_initialized() -> bool:
    """Return whether the ranks of this process are connected."""
    return bool(PartialState._shared_state)  # pyright: ignore[reportPrivateUsage]


def distributed_type_on(device_kind: str) -> DistributedType:
    """Return the `DistributedType` of several processes on a kind of device."""
    if device_kind not in TYPE_BY_DEVICE:
        raise NotImplementedError(
            f"several processes on {device_kind}: programs for Accelerate train here on several of "
            f"{', '.join(TYPE_BY_DEVICE)}; run one process on {device_kind}, or several with Accelerator(cpu=True)"
        )
    return TYPE_BY_DEVICE[device_kind]


def asks_for_cpu() -> bool:
    """Return whether the launch says to compute on the CPU."""
    return says_yes("ACCELERATE_USE_CPU")
