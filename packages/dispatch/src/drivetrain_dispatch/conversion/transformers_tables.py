"""Apply transformers' own conversion tables (`transformers.conversion_mapping`, from 5.0 on) to lazy tensors.

`save_pretrained` writes many models in the form in which they were first published, and `from_pretrained` renames,
splits and stacks tensors on load.
"""

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.model.model_layout import ModelLayout

_COMPUTED_TABLES = ("inv_freq", "position_ids")


def converted_names(layout: ModelLayout, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return a checkpoint's tensors by a transformers model's names and shapes; for other models, unchanged."""
    model, wanted = layout.model, layout.state
    if not any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        return dict(tensors)
    try:
        mapping: Any = import_module("transformers.conversion_mapping")
        loading: Any = import_module("transformers.core_model_loading")
        base: Any = import_module("transformers").PreTrainedModel
    except ImportError:  # an older transformers
        return dict(tensors)
    if not isinstance(model, base):
        return dict(tensors)
    found = _convert(model, loading, mapping.get_model_conversion_mapping(model), tensors, wanted)
    # The model's class allows some unexpected tensors, and older versions stored tables that the model computes now.
    tables = {buffer.rpartition(".")[2] for buffer in layout.buffers if buffer.endswith(_COMPUTED_TABLES)}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    found = {
        name: tensor
        for name, tensor in found.items()
        if name in wanted or not (name.rpartition(".")[2] in tables or _matches(name, ignored))
    }
    return found | _find_computed(layout, found)


def _convert(
    model: Any,
    loading: Any,
    transforms: Collection[Any],
    tensors: Mapping[str, LazyTensor],
    wanted: Mapping[str, Tensor],
) -> dict[str, LazyTensor]:
    renamings = [transform for transform in transforms if isinstance(transform, loading.WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, LazyTensor] = {}
    groups: dict[str, Any] = {}  # converters by the first name that each produces
    # Experts are stacked in the order of their names.
    for name in sorted(tensors, key=loading.dot_natural_key):
        new, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if new not in wanted and name in wanted:
            new, pattern = loading.rename_source_key(name, [], [], model.base_model_prefix, wanted)
        if new not in wanted:
            found[name] = tensors[name]
        elif pattern is None:
            if new in found:
                raise WeightFilesError(
                    f"several tensors of the checkpoint map to {new!r} of the model, {name!r} among them"
                )
            found[new] = tensors[name]
        else:
            if new not in groups:
                groups[new] = deepcopy(by_pattern[pattern])
            groups[new].add_tensor(new, name, pattern, tensors[name])
    for first, group in groups.items():
        try:
            made = group.convert(first, model=model, config=model.config)
        except Exception as error:  # functions of the tables may raise anything
            raise WeightFilesError(
                f"transformers' conversion to {first!r} of {type(model).__name__} does not fit the checkpoint: "
                f"{type(error).__name__}: {error}"
            ) from error
        found.update({name: value[0] if isinstance(value, list) else value for name, value in made.items()})
    return found


def _find_computed(layout: ModelLayout, found: Collection[str]) -> dict[str, LazyTensor]:
    """Return tensors, such as position tables, that checkpoints may omit because the model computes them."""
    patterns = getattr(layout.model, "_keys_to_ignore_on_load_missing", None)
    computed: dict[str, LazyTensor] = {}
    for names in layout.aliases:
        first, tensor = names[0], layout.tensors[names[0]]
        absent = first in layout.parameters and tensor.is_meta and not any(name in found for name in names)
        if not absent or not _matches(first, patterns):
            continue
        compute = partial(_initialise, layout.model, first)  # on demand: it copies a module
        with torch.random.fork_rng(devices=[]):
            is_drawn = not torch.equal(compute(), compute())
        if not is_drawn:
            computed[first] = LazyTensor.computed(tensor, compute)
    return computed


def _initialise(model: Any, name: str) -> Tensor:
    """Return the initial values of a parameter."""
    outer, _, leaf = name.rpartition(".")
    module = deepcopy(model.get_submodule(outer)).to_empty(device="cpu")
    model._init_weights(module)
    return getattr(module, leaf).detach()


def _matches(name: str, patterns: Collection[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
