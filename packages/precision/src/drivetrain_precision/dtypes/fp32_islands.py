"""Modules that stay in fp32 in a model that is held or computed in half precision.

A module keeps its identity, its names in the state dict and its hooks: only its class is exchanged for a subclass
whose `forward` casts its inputs to fp32, leaves autocast, and casts its outputs back. A copy or pickle of the module
stays in fp32 too.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain_precision.dtypes.dtype_policy import HALF
from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.nested_tensors import cast_floating, floating_tensors


class Fp32Island:
    """The base of the classes that `keep_in_fp32` makes; each replaces its `outer_class`."""

    outer_class: type[nn.Module]


def find_islands(
    models: Iterable[nn.Module], patterns: Iterable[str], *, known: Iterable[nn.Module] = ()
) -> dict[nn.Module, frozenset[nn.Module]]:
    """Return the modules of each model that stay in fp32; no model is changed.

    A pattern, in the form of a shell's file names, matches a module by its dotted name ("*.norm"; a star spans dots
    too) or by the name of its class ("LlamaRMSNorm"), or the module that holds a parameter of a matching name
    ("*.router.weight"). A module is matched with all modules inside it.

    Args:
        models: The models to search.
        patterns: The patterns of names and classes.
        known: Further models, such as models prepared earlier, that a pattern may match instead.

    Raises:
        PrecisionError: A pattern matches nothing, or all of a model; or a module in fp32 shares a parameter with a
            module in another dtype.
    """
    models, patterns = list(models), tuple(patterns)
    found = {model: [p for p in patterns if matching_modules(model, p)] for model in [*models, *known]}
    for pattern in patterns:
        if found and not any(pattern in matched for matched in found.values()):
            raise PrecisionError(_explain_no_match(pattern, found))
    return {model: _islands(model, found[model]) for model in models}


def matching_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the modules of a model that a pattern matches, by name; the root's name is empty."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        kind: type[nn.Module] = getattr(module, "outer_class", type(module))
        own = (f"{name}.{each}" if name else each for each, _ in module.named_parameters(recurse=False))
        is_named = (name and fnmatchcase(name, pattern)) or fnmatchcase(kind.__name__, pattern)
        if is_named or any(fnmatchcase(each, pattern) for each in own):
            found[name] = module
    return found


def keep_in_fp32(
    islands: Iterable[nn.Module], device: torch.device, *, outside: torch.dtype | None = None
) -> None:
    """Make modules compute in fp32, in place. The caller must cast their parameters.

    Args:
        islands: The modules, including modules inside them.
        device: The device that the modules compute on.
        outside: The output dtype of modules without a floating-point input, such as an embedding or a rotary table;
            None leaves outputs unchanged. Other modules return the dtype of their first floating-point input.

    Raises:
        PrecisionError: A module has a `forward` set on the object, which would be called instead of the class's.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}  # one a class, or each module would be compiled anew
    for module in islands:
        restore_island(module)
        if "forward" in vars(module):
            raise PrecisionError(
                f"precision.keep_fp32: a {type(module).__name__} has a forward that was set on the module itself, "
                "which would run in place of the one in fp32; leave it out of the patterns, or remove that forward"
            )
        original = type(module)
        if original not in classes:
            classes[original] = _island_class(original, device.type, outside)
        module.__class__ = classes[original]


def restore_island(module: nn.Module) -> None:
    """Undo `keep_in_fp32` of a module in place; do nothing for other modules."""
    if isinstance(module, Fp32Island):
        module.__class__ = module.outer_class  # pyright: ignore[reportAttributeAccessIssue]


def _island_class(
    original: type[nn.Module], device_type: str, outside: torch.dtype | None
) -> type[nn.Module]:
    @wraps(original.forward)  # whose signature callers may read
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = next((each.dtype for each in floating_tensors((args, kwargs))), outside)
        wide_args = cast_floating(args, torch.float32, only=HALF)
        wide_kwargs = cast_floating(kwargs, torch.float32, only=HALF)
        with torch.autocast(device_type, enabled=False):
            output = original.forward(self, *wide_args, **wide_kwargs)
        return cast_floating(output, given, only=(torch.float32,)) if given in HALF else output

    def reduce_as_island(self: nn.Module, protocol: Any) -> Any:
        function, arguments, *rest = original.__reduce_ex__(self, protocol)
        plain = tuple(original if a is type(self) else a for a in arguments)
        called = original if function is type(self) else function
        return _rebuild, (original, called, plain, device_type, outside), *rest

    members: dict[str, Any] = {
        "forward": forward,
        "__reduce_ex__": reduce_as_island,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "outer_class": original,
    }
    return cast("type[nn.Module]", type(original.__name__, (Fp32Island, original), members))


def _rebuild(
    original: type[nn.Module],
    function: Callable[..., nn.Module],
    arguments: tuple[Any, ...],
    device_type: str,
    outside: torch.dtype | None,
) -> nn.Module:
    """Return an empty module in fp32 for copy and pickle to fill."""
    module = function(*arguments)
    module.__class__ = _island_class(original, device_type, outside)
    return module


def _islands(model: nn.Module, patterns: Iterable[str]) -> frozenset[nn.Module]:
    """Return the modules that patterns match, with all modules inside them."""
    matched = [module for pattern in patterns for module in matching_modules(model, pattern).values()]
    islands = frozenset(inner for module in matched for inner in module.modules())
    names = {module: name for name, module in model.named_modules()}
    holders: dict[Tensor, tuple[nn.Module, str]] = {}
    is_all = bool(islands)
    for module, prefix in names.items():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            is_all = is_all and module in islands
            other, first = holders.setdefault(parameter, (module, name))
            if (other in islands) != (module in islands):
                kept, free = (name, first) if module in islands else (first, name)
                raise PrecisionError(
                    f"precision.keep_fp32={tuple(patterns)!r}: {kept} stays in fp32 and is tied to {free}, which is "
                    "not, and a parameter has one dtype: let the patterns match both modules, or neither"
                )
    if is_all:
        raise PrecisionError(
            f"precision.keep_fp32={tuple(patterns)!r}: it keeps every parameter of {type(model).__name__} in fp32; "
            "name fewer modules, or train in fp32: mixed_precision='no' without param_dtype"
        )
    return islands


def _explain_no_match(pattern: str, models: Mapping[nn.Module, object]) -> str:
    kinds = " and ".join(type(model).__name__ for model in models)
    names: dict[str, None] = {}
    for model in models:
        for name, module in model.named_modules():
            names |= dict.fromkeys(filter(None, (name, type(module).__name__)))
    bare = pattern.strip("*.")
    near = [name for name in names if bare and bare.lower() in name.lower()]
    lowered = {name.lower(): name for name in names}
    near += [lowered[each] for each in get_close_matches(bare.lower(), lowered, n=5, cutoff=0.5)]
    shown = ", ".join(list(dict.fromkeys(near))[:5])
    hint = f"the nearest here: {shown}" if shown else "none here is like it"
    return (
        f"precision.keep_fp32: {pattern!r} matches no module and no parameter of {kinds}. It is compared with dotted "
        f"names ('*.norm') and names of classes ('LayerNorm'); {hint}"
    )
