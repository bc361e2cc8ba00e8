"""The bytes of a model, of its modules and of its tensors, even on the meta device."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain_accelerate.models.module_tensors import dtype_of
from drivetrain_accelerate.plugins.enums import CustomDtype
from drivetrain_dispatch import compute_module_sizes as sizes_of_modules
from drivetrain_dispatch.model.model_layout import ModelLayout, enclosing_modules, listed

AnyDtype = str | torch.dtype | CustomDtype
_BYTES_OF_CUSTOM = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# A part of a model in a list of those to place: a module, or a parameter.
NamedPart = tuple[str, nn.Module]


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes, given with a unit such as "5GB" or "5GiB"; "Gb" means bits."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMG]i?B)\s*", size, re.IGNORECASE)
    if match is None:
        raise ValueError(f"size={size!r}: give an int of bytes, or a number with a unit: {', '.join(_UNITS)}")
    factor = next(size for unit, size in _UNITS.items() if unit.upper() == match[2].upper())
    in_bits = match[2].endswith("b") and "i" not in match[2].lower()
    return int(float(match[1]) * factor) // (8 if in_bits else 1)


def dtype_byte_size(dtype: torch.dtype) -> int | float:
    """Return the bytes of one element of a dtype, also of a dtype that torch does not have."""
    given: Any = dtype
    if isinstance(given, CustomDtype):
        return _BYTES_OF_CUSTOM[given]
    return 1 / 8 if dtype == torch.bool else dtype.itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.device | None = None,
    special_dtypes: dict[str, str | torch.device] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of a model, as `""`, and of each module and tensor in it."""
    plain, sizes = planned_sizes(model, dtype, special_dtypes)
    each = sizes_of_modules(model, dtype=plain, special_sizes=sizes)
    if not buffers_only:
        return each
    found: defaultdict[str, int] = defaultdict(int)
    for name, _ in model.named_buffers():
        for part in (*enclosing_modules(name), name):
            found[part] += each[name]
    return dict(found)


def planned_sizes(
    model: nn.Module, dtype: Any, special_dtypes: Mapping[str, Any] | None
) -> tuple[torch.dtype | None, dict[str, int]]:
    """Return the dtype, None if torch has no such dtype, and the bytes of tensors whose dtype differs."""
    tensors = ModelLayout.of(model).tensors
    special = {name: each for name, each in (special_dtypes or {}).items() if name in tensors}
    if isinstance(dtype, CustomDtype):
        floating = {name: dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
        special = {**floating, **special}
        dtype = None
    sizes: dict[str, int] = {}
    for name, each in special.items():
        chosen: Any = each if isinstance(each, CustomDtype) else dtype_of(each)
        sizes[name] = int(tensors[name].numel() * dtype_byte_size(chosen))
    return dtype_of(dtype), sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.device | None = None,
    special_dtypes: dict[str, str | torch.device] | None = None,
) -> int:
    """Return the bytes of all buffers of a model; see `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a model, the bytes of its largest layer, and the names of the layers of that size."""
    sizes = compute_module_sizes(model)
    whole = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(list(model.named_children()), sizes, list(whole))


def get_max_layer_size(
    modules: list[tuple[str, nn.Module]], module_sizes: dict[str, int], no_split_module_classes: list[str]
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer in parts of a model, and the names of the layers of that size."""
    names = list(_layers(modules, listed(no_split_module_classes or ())))
    largest = max((module_sizes.get(name, 0) for name in names), default=0)
    return largest, [name for name in names if module_sizes.get(name, 0) == largest]


def _layers(parts: Iterable[NamedPart], whole: Collection[str]) -> Iterable[str]:
    """Yield the names of the layers in the parts: modules without submodules, and classes in `whole`."""
    for part in parts:
        inside = _inside(part, whole)
        yield from _layers(inside, whole) if inside else (part[0],)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the modules and tensors that contain no others."""
    outer = {around for name in module_sizes for around in enclosing_modules(name) if around}
    return [name for name in module_sizes if name and name not in outer]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: list[NamedPart],
) -> tuple[int, list[str], list[nn.Module]]:
    """Return the bytes of a module and the modules that share its weights, and these modules' names and modules."""
    names, modules, size = list[str](), list[nn.Module](), module_size
    for tied in tied_params:
        found = next(
            ((name, part) for name, part in modules_to_treat if tied == name or tied.startswith(f"{name}.")),
            None,
        )
        if found is not None and found[0] not in names:
            names.append(found[0])
            modules.append(found[1])
            size += module_sizes[found[0]] - module_sizes[tied]
    return size, names, modules


def fallback_allocate(
    modules: list[tuple[str, nn.Module]],
    module_sizes: dict[str, int],
    size_limit: int | str,
    no_split_module_classes: list[str] | None = None,
    tied_parameters: list[list[str]] | None = None,
) -> tuple[str | None, nn.Module | None, list[tuple[str, nn.Module]]]:
    """Return the first module within a size, as its name and the module, and the other parts."""
    limit = convert_file_size_to_int(size_limit)
    whole = listed(no_split_module_classes or ())
    shared = [name for group in tied_parameters or () for name in group]
    for place, (name, part) in enumerate(modules):
        before, behind = modules[:place], modules[place + 1 :]
        ties = any(tied == name or tied.startswith(f"{name}.") for tied in shared)
        if not ties and module_sizes.get(name, 0) <= limit:
            return name, part, [*before, *behind]
        if inside := _inside((name, part), whole):
            found, module, left = fallback_allocate(inside, module_sizes, limit, list(whole), tied_parameters)
            if found is not None:
                own: list[Any] = [
                    (f"{name}.{inner}", each) for inner, each in part.named_parameters(recurse=False)
                ]
                return found, module, [*before, *own, *left, *behind]
    return None, None, modules


def _inside(part: NamedPart, whole: Collection[str]) -> list[NamedPart]:
    name, module = part
    if not isinstance(module, nn.Module) or type(module).__name__ in whole:  # pyright: ignore[reportUnnecessaryIsInstance]
        return []
    return [(f"{name}.{inner}", child) for inner, child in module.named_children()]
