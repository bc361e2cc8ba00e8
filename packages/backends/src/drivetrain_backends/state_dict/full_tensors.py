"""A model's tensors whole, one at a time: what a full state dict costs is then one tensor beyond the shards."""

from collections.abc import Generator, Mapping
from itertools import chain

import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends.modules.compile import plain_name
from drivetrain_backends.protocol import Prepared
from drivetrain_backends.state_dict.dtensor import local, write_from_first
from drivetrain_backends.state_dict.full_state_dict import whole
from drivetrain_state import Context


def whole_tensors(
    prepared: Prepared, context: Context, *, everywhere: bool = False
) -> Generator[tuple[str, Tensor | None]]:
    """Gather a model's state one tensor at a time. Called on all ranks, and run to its end on all of them.

    Args:
        prepared: The prepared model, on all ranks.
        context: Ranks and device.
        everywhere: Whether all ranks get them.

    Yields:
        Each name with the whole tensor on the CPU on rank 0, and None on the other ranks. The tensor is a copy.

    Raises:
        TypeError: It is a module, as an Accelerator returns it.
    """
    _check_prepared("whole_tensors", prepared)
    keep = everywhere or context.topology.is_main
    for name, value in prepared.state_dict()["model"].items():
        if not isinstance(value, Tensor) and not hasattr(value, "full_tensor"):
            continue
        gathered = whole(value)
        yield name, gathered.detach().to("cpu", copy=True) if keep else None
        del gathered


def whole_model(prepared: Prepared, context: Context, *, everywhere: bool = False) -> dict[str, Tensor]:
    """A model's state as one process would have it, gathered one tensor at a time. Called on all ranks.

    Args:
        prepared: The prepared model, on all ranks.
        context: Ranks and device.
        everywhere: Whether all ranks get it.

    Returns:
        Copies on the CPU by plain names, a tied weight the same tensor under all of its names; empty on ranks that do
        not get it. What a module keeps beside tensors (`get_extra_state`) is left out.
    """
    found: dict[str, Tensor] = {}
    tied = tied_weights(prepared)
    for name, tensor in whole_tensors(prepared, context, everywhere=everywhere):
        if tensor is not None:
            found[name] = found.get(tied.get(name, name), tensor)
    return found


def tied_weights(prepared: Prepared) -> dict[str, str]:
    """The names of a model's parameters and buffers that are the same object as one of an earlier name.

    Args:
        prepared: The prepared model, on all ranks.

    Returns:
        Plain name to the first plain name of the same object.
    """
    model = prepared.unwrap()
    first_name: dict[int, str] = {}
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    first = {plain_name(name): first_name.setdefault(id(value), plain_name(name)) for name, value in named}
    return {name: earlier for name, earlier in first.items() if name != earlier}


def load_whole(prepared: Prepared, tensors: Mapping[str, Tensor] | None, context: Context) -> None:
    """Load a model from whole tensors that rank 0 alone reads, each when its turn comes. Called on all ranks.

    A mapping that reads on demand, such as one over safetensors' `safe_open`, keeps rank 0 to one tensor as well.

    Args:
        prepared: The prepared model, on all ranks.
        tensors: Whole tensors by name on rank 0; other ranks give None.
        context: Ranks and device.

    Raises:
        ValueError: Names or shapes are not the model's. Raised on all ranks.
        TypeError: The backend's state is made of copies, as that of DeepSpeed's engines; or `prepared` is a module.
    """
    _check_prepared("load_whole", prepared)
    state = prepared.state_dict()["model"]
    own = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if any(hasattr(value, "full_tensor") and name not in own for name, value in state.items()):
        raise TypeError(
            f"{type(prepared).__name__} hands out no tensors of its own to write into; load it with load_state_dict()"
        )
    _check_live(prepared, own)
    if said := _agree(context, _difference(own, tensors) if context.topology.is_main else ""):
        raise ValueError(said)
    for name, target in own.items():
        value = tensors[name] if context.topology.is_main and tensors is not None else None
        odd = (
            "" if value is None or value.shape == target.shape else f"{name} is of shape {tuple(value.shape)}"
        )
        if said := _agree(context, odd):
            raise ValueError(f"{said}, not {tuple(target.shape)}; those before it are loaded")
        write_from_first(target, value, context)


def _check_prepared(function: str, given: object) -> None:
    """Say what is wanted in the place of a module, which has a `state_dict` too."""
    if isinstance(given, nn.Module):
        raise TypeError(
            f"{function}({type(given).__name__}): it takes what a backend's prepare() returns; a model of an "
            "Accelerator is read by accelerator.get_state_dict(model), and written in accelerator.gathered(model, "
            "write=True)"
        )


def _check_live(prepared: Prepared, own: Mapping[str, Tensor]) -> None:
    """Refuse to write into copies, which would change nothing.

    Raises:
        TypeError: The backend's state is one of copies.
    """
    live = prepared.unwrap().state_dict()
    for name, value in own.items():
        if local(value).data_ptr() != local(live[name]).data_ptr():
            raise TypeError(
                f"{type(prepared).__name__} hands out copies of its state ({name}); load it with load_state_dict()"
            )


def _agree(context: Context, said: str) -> str:
    """What rank 0 says, on all ranks."""
    if context.group is None:
        return said
    from_first = [said]
    dist.broadcast_object_list(from_first, src=0)
    return from_first[0]


def _difference(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor] | None) -> str:
    """How the names on rank 0 differ from the model's; empty where they do not."""
    if tensors is None:
        return "load_whole(tensors=None) on rank 0: it is the rank that reads; give it the mapping"
    missing, unexpected = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    if missing or unexpected:
        return (
            f"the tensors are not the model's: missing {missing[:5]}, unexpected {unexpected[:5]}; rename them, or "
            "build the model they are of"
        )
    return ""
