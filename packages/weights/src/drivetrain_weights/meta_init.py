"""Values for modules built on the meta device, from the modules' own initialisation methods.

A module's name gives its seed, so that its values depend neither on the other modules of the same fill nor on the
number of ranks.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_weights.compat import RESET_METHODS


@contextmanager
def parameters_on_meta() -> Generator[None]:
    """Create the parameters of this thread's modules on meta in the block; buffers stay real.

    Constructors compute many buffers (masks, rotary frequencies) that no later call could recreate.
    """
    thread, moved = get_ident(), WeakIdKeyDictionary()

    def register(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or get_ident() != thread:
            return parameter
        if parameter not in moved:  # tied parameters stay tied
            moved[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return moved[parameter]

    # torch uses the parameter that a hook returns, although its annotation says None.
    handle = register_module_parameter_registration_hook(cast("Callable[..., None]", register))
    try:
        yield
    finally:
        handle.remove()


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and buffers by attribute; a tied tensor has several entries."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


def replace_meta_tensors(
    modules: Iterable[nn.Module], new_tensor: Callable[[Tensor], Tensor]
) -> dict[nn.Module, tuple[str, ...]]:
    """Replace tensors on meta by empty tensors, and keep ties; return the replaced attributes of each module."""
    new: dict[Tensor, Tensor] = {}
    found: dict[nn.Module, tuple[str, ...]] = {}
    for module in modules:
        empty = {name: tensor for name, tensor in tensors_of(module).items() if tensor.is_meta}
        for name, tensor in empty.items():
            if tensor not in new:
                values = new_tensor(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                new[tensor] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
            setattr(module, name, new[tensor])
        if empty:
            found[module] = tuple(empty)
    return found


def check_ways(model: nn.Module, on_meta: Collection[str]) -> None:
    """Refuse a model if no method certainly fills a tensor of `on_meta`, which holds tensors' names."""
    if any(callable(getattr(module, "_init_weights", None)) for module in model.modules()):
        return
    fillable: set[Tensor] = set()
    for module in model.modules():
        if any(callable(getattr(module, name, None)) for name in RESET_METHODS):
            fillable.update(tensors_of(module).values())
    for prefix, module in model.named_modules():
        for attribute, tensor in tensors_of(module).items():
            name = f"{prefix}.{attribute}".lstrip(".")
            if name in on_meta and tensor not in fillable:
                raise ValueError(_describe_unfillable(name, module))


def initialise(
    empty: dict[nn.Module, tuple[str, ...]],
    names: dict[nn.Module, str],
    around: Sequence[nn.Module],
    seed: int,
) -> None:
    """Fill empty tensors by each module's own `reset_parameters` and the model's `_init_weights`.

    `around` are the modules whose `_init_weights(module)` is called; the seed is the same on all ranks.
    """
    ways = [way for module in around if callable(way := getattr(module, "_init_weights", None))]
    filled: set[Tensor] = set()
    # Inner modules first, whose names are longer: a module may initialise its children's tensors anew.
    for module, missing in sorted(empty.items(), key=lambda item: -len(names[item[0]])):
        tensors = tensors_of(module)
        attributes = [name for name in missing if tensors[name] not in filled]
        if not attributes:  # tied to those of an earlier module
            continue
        filled.update(tensors[name] for name in attributes)
        kept = {name: t.detach().clone() for name, t in tensors.items() if name not in attributes}
        for name in attributes:
            _mark(tensors[name])
        devices = {t.device for t in tensors.values() if t.device.type != "cpu"}
        with torch.random.fork_rng(
            devices=list(devices), device_type=next(iter(devices), torch.device("cuda")).type
        ):
            torch.manual_seed(crc32(f"{seed} {names[module]}".encode()))
            own = (getattr(module, name, None) for name in RESET_METHODS)
            if (reset := next(filter(callable, own), None)) is not None:
                reset()
            for way in ways:
                way(module)
        with torch.no_grad():
            for name, values in kept.items():
                tensors[name].copy_(values)
        for name in attributes:
            if _is_marked(tensors_of(module)[name]):
                raise ValueError(_describe_unfillable(f"{names[module]}.{name}".lstrip("."), module))


@torch.no_grad()
def _mark(tensor: Tensor) -> None:
    """Fill a tensor with a value that initialisers do not write."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype is not torch.bool:
        tensor.fill_(
            torch.iinfo(tensor.dtype).min if tensor.dtype.is_signed else torch.iinfo(tensor.dtype).max
        )


def _is_marked(tensor: Tensor) -> bool:
    """Return whether an element still holds the mark; True for a boolean tensor, which has no spare value.

    The test allocates nothing: a mask of the elements would leave a hole in the allocator for every tensor.
    """
    if tensor.numel() == 0:
        return False
    if tensor.dtype is torch.bool:
        return True
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
    if tensor.is_floating_point():
        return bool(tensor.min().isnan())
    if tensor.dtype.is_signed:
        return int(tensor.min()) == torch.iinfo(tensor.dtype).min
    return int(tensor.max()) == torch.iinfo(tensor.dtype).max


def _describe_unfillable(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return (
        f"{name} is on the meta device, and {kind} has no way to fill it: give {kind} a reset_parameters(), or the "
        "model an _init_weights(module), that does; or build the model with values on rank 0, from where they reach "
        "the others"
    )
