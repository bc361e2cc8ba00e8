"""Keep the state of an optimizer in files: create and update it there, never whole in memory."""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any, cast
from uuid import uuid4

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_dispatch.compat import Args, Kwargs, Types
from drivetrain_dispatch.errors import OffloadedError, WeightFilesError
from drivetrain_messages import format_size

_MARK = "_drivetrain_offload"  # the name of the optimizer's attribute
_SMALL_BYTES = 64 << 10  # step counts and the like stay in memory
# The functions by which optimizers create their state.
_MAKES = (torch.zeros_like, torch.full_like, torch.ones_like, torch.clone, Tensor.clone)


class OptimizerOffload:
    """The offload of an optimizer's state to files in a folder, until it is removed."""

    def __init__(self, optimizer: Optimizer, folder: Path) -> None:
        self._optimizer = optimizer
        self._folder = folder
        self._kept = WeakIdKeyDictionary()
        self._was_own = optimizer.__dict__.get("step")
        self._handle = optimizer.register_load_state_dict_post_hook(self._keep_all)
        self._keep_all(optimizer)
        setattr(optimizer, _MARK, True)
        # Learning-rate schedulers expect a bound method.
        optimizer.step = MethodType(self._wrap_step(optimizer.step), optimizer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Stop creating files. State that is in files stays in them, as ordinary tensors."""
        self._handle.remove()
        delattr(self._optimizer, _MARK)
        if self._was_own is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._was_own  # type: ignore[method-assign]

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a large host tensor in an unnamed file, which is freed with the tensor; return others unchanged."""
        if tensor in self._kept or tensor.device.type != "cpu" or tensor.nbytes < _SMALL_BYTES:
            return tensor
        path = self._folder / f"state-{uuid4().hex}"
        try:
            with path.open("xb") as file:
                # Reserve the space now: with a sparse file, a full disk would kill the process at a later write.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
                else:
                    file.truncate(tensor.nbytes)
            pages = torch.from_file(str(path), shared=True, size=tensor.nbytes, dtype=torch.uint8)
        except OSError as error:
            raise WeightFilesError(
                f"{self._folder} has no room for {format_size(tensor.nbytes)} of an optimizer's state ({error}): "
                "free the disk, or name another folder"
            ) from error
        finally:
            path.unlink(missing_ok=True)
        kept = pages.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._kept[kept] = True
        return kept

    def _keep_all(self, optimizer: Optimizer) -> None:
        for state in cast("Mapping[Tensor, dict[str, object]]", optimizer.state).values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = self.kept(value)

    def _wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the optimizer's step so that new state is created in files."""

        @wraps(step)
        def stepped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            groups = cast("list[dict[str, list[Tensor]]]", optimizer.param_groups)
            state = cast("dict[Tensor, object]", optimizer.state)
            if all(parameter in state for group in groups for parameter in group["params"]):
                return step(*args, **kwargs)
            before = len(state)
            try:
                with _Making(self):
                    output = step(*args, **kwargs)
            except WeightFilesError:
                new = list(state)[before:]
                for parameter in new:  # what was not created in full is created by the next step
                    if not state[parameter] or parameter is new[-1]:
                        del state[parameter]
                raise
            self._keep_all(optimizer)
            return output

        return stepped


class _Making(TorchFunctionMode):
    """A mode that creates state in files, one tensor after the other."""

    def __init__(self, offload: OptimizerOffload) -> None:
        super().__init__()
        self._offload = offload

    def __torch_function__(self, func: Any, types: Types, args: Args = (), kwargs: Kwargs = None) -> Any:
        """Run the function; if the result is new optimizer state, return it in a file."""
        made = func(*args, **(kwargs or {}))
        if func not in _MAKES or not isinstance(made, Tensor):
            return made
        with torch.no_grad():
            return self._offload.kept(made)


def disk_offload_optimizer(optimizer: Optimizer, offload_dir: Path | str) -> OptimizerOffload:
    """Keep the state of an optimizer (averages, momenta) on the disk.

    The first step creates the state in files, one tensor after the other, and each step updates it there. The system
    writes changed pages to the disk and reuses their memory. With weights on the disk (`disk_offload(...,
    write_back=True)`) this trains models larger than the memory. Parameters must be on the host; state tensors of
    less than 64 KiB stay in memory.

    Args:
        optimizer: An optimizer of torch, or one that creates its state in the same way.
        offload_dir: The folder for the files; created if it does not exist. The files have no names and are freed
            with the optimizer.

    Returns:
        The offload, whose `remove()` ends it.

    Raises:
        OffloadedError: The optimizer is offloaded already.
        WeightFilesError: The disk has no room. A step may raise it too.
    """
    if hasattr(optimizer, _MARK):
        raise OffloadedError("the optimizer is offloaded already: remove() its OptimizerOffload first")
    folder = Path(offload_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightFilesError(f"{folder} cannot be made ({error}): name another folder") from error
    return OptimizerOffload(optimizer, folder)
