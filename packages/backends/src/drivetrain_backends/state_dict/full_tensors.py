"""Full tensors from sharded states. A model's tensors are gathered one at a time: memory holds one full tensor."""

from collections.abc import Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain_backends.modules.compile import strip_wrapper_prefix
from drivetrain_backends.protocol import Prepared
from drivetrain_backends.state_dict.dtensor import local, whole_of, write_from_first
from drivetrain_state import Context, broadcast_object
from drivetrain_weights import find_ties


def full_tensor(value: Any) -> Tensor:
    """Return a tensor of a state, gathered if it is sharded. Called on all ranks, in the same order.

    Args:
        value: A tensor, or an object with `full_tensor()`, like torch's DTensor.
    """
    if not hasattr(value, "full_tensor"):
        return value
    if isinstance(
        value, Tensor
    ):  # a DTensor, which may be offloaded while its mesh communicates on another device
        return whole_of(value, torch.device(cast("Any", value).device_mesh.device_type))
    return value.full_tensor()


def full_state_dict(state: Any, *, keep: bool = True) -> Any:
    """Return a nested state with its sharded tensors replaced by full ones on the CPU. Called on all ranks.

    Tensors are gathered one at a time. A tensor that occurs twice in the state, such as a tied weight, is gathered
    once and stays shared.

    Args:
        state: Nested dicts, lists and tuples.
        keep: Whether this rank keeps the tensors; otherwise None replaces them.
    """
    return _whole(state, keep, {})


def _whole(value: Any, keep: bool, met: dict[int, Any]) -> Any:
    if hasattr(value, "full_tensor"):
        if id(value) not in met:
            gathered = value.full_tensor()
            # The value is kept alive, so that its id stays unique.
            met[id(value)] = (value, gathered.detach().cpu() if keep else None)
        return met[id(value)][1]
    if isinstance(value, Mapping):
        return {key: _whole(one, keep, met) for key, one in cast("Mapping[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(one, keep, met) for one in cast("list[Any]", value))
    return value


def iter_full_tensors(
    prepared: Prepared, context: Context, *, everywhere: bool = False
) -> Generator[tuple[str, Tensor | None]]:
    """Yield a model's full tensors one at a time. Called on all ranks, each of which exhausts the generator.

    Args:
        prepared: The prepared model, on all ranks.
        context: The ranks and the device.
        everywhere: Whether all ranks get the tensors.

    Yields:
        Each name with a copy of the full tensor on the CPU; the copy is None on ranks that do not get it.

    Raises:
        TypeError: `prepared` is a module, such as `Accelerator.prepare` returns.
    """
    _check_prepared("iter_full_tensors", prepared)
    keep = everywhere or context.topology.is_main
    for name, value in prepared.state_dict()["model"].items():
        if not isinstance(value, Tensor) and not hasattr(value, "full_tensor"):
            continue
        gathered = full_tensor(value)
        yield name, gathered.detach().to("cpu", copy=True) if keep else None
        del gathered


def full_model(prepared: Prepared, context: Context, *, everywhere: bool = False) -> dict[str, Tensor]:
    """Return the state of a model that a single process would have, one tensor at a time. Called on all ranks.

    Args:
        prepared: The prepared model, on all ranks.
        context: The ranks and the device.
        everywhere: Whether all ranks get the state.

    Returns:
        Copies on the CPU by plain names; empty on ranks that do not get the state. A tied weight is one tensor under
        all of its names. Module state other than tensors (`get_extra_state`) is left out.
    """
    found: dict[str, Tensor] = {}
    tied = find_ties(prepared.unwrap(), rename=strip_wrapper_prefix)
    for name, tensor in iter_full_tensors(prepared, context, everywhere=everywhere):
        if tensor is not None:
            found[name] = found.get(tied.get(name, name), tensor)
    return found


def load_full_state_dict(prepared: Prepared, tensors: Mapping[str, Tensor] | None, context: Context) -> None:
    """Load a model from full tensors that only rank 0 reads, one at a time. Called on all ranks.

    If the mapping reads on demand, as over safetensors' `safe_open`, rank 0 too holds only one tensor at a time.

    Args:
        prepared: The prepared model, on all ranks.
        tensors: The full tensors by name on rank 0; None on other ranks.
        context: The ranks and the device.

    Raises:
        ValueError: Names or shapes differ from the model's. Raised on all ranks.
        TypeError: The backend's state consists of copies, as with DeepSpeed's engines; or `prepared` is a module.
    """
    _check_prepared("load_full_state_dict", prepared)
    state = prepared.state_dict()["model"]
    own = {
        n: value for n, value in state.items() if isinstance(value, Tensor) or hasattr(value, "held_boxes")
    }
    if any(hasattr(value, "full_tensor") and name not in own for name, value in state.items()):
        raise TypeError(
            f"{type(prepared).__name__} hands out no tensors of its own to write into; load it with load_state_dict()"
        )
    _check_live(prepared, own)
    if said := broadcast_object(context, _difference(own, tensors) if context.topology.is_main else ""):
        raise ValueError(said)
    for name, target in own.items():
        value = tensors[name] if context.topology.is_main and tensors is not None else None
        shape = broadcast_object(context, target.shape if value is None else value.shape)
        if shape != target.shape:
            raise ValueError(
                f"{name} is of shape {tuple(shape)}, not {tuple(target.shape)}; the tensors before it are already "
                "loaded"
            )
        write_from_first(target, value, context)


def _check_prepared(function: str, given: object) -> None:
    """Refuse a module that is passed in place of a `Prepared`; both have a `state_dict`."""
    if isinstance(given, nn.Module):
        raise TypeError(
            f"{function}({type(given).__name__}): it takes what a backend's prepare() returns; a model of an "
            "Accelerator is read by accelerator.get_state_dict(model), and written in accelerator.gathered(model, "
            "write=True)"
        )


def _check_live(prepared: Prepared, own: Mapping[str, Any]) -> None:
    """Refuse a backend whose state consists of copies: a write into copies would change nothing."""
    live = prepared.unwrap().state_dict()
    for name, value in own.items():
        if isinstance(value, Tensor) and local(value).data_ptr() != local(live[name]).data_ptr():
            raise TypeError(
                f"{type(prepared).__name__} hands out copies of its state ({name}); load it with load_state_dict()"
            )


def _difference(own: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> str:
    """Return a message on how rank 0's names differ from the model's names; empty if they are equal."""
    if tensors is None:
        return "load_full_state_dict(tensors=None) on rank 0: rank 0 reads the tensors; give it the mapping"
    missing, unexpected = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    if missing or unexpected:
        return (
            f"the tensors are not the model's: missing {missing[:5]}, unexpected {unexpected[:5]}; rename them, or "
            "build the model they are of"
        )
    return ""
