"""Give a model without memory its weights from where a program has offloaded them, as pages of the files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike

import torch
from torch import Tensor, nn

from drivetrain_accelerate.models.offload_folder import Entry, OffloadedWeightsLoader, dtype_named
from drivetrain_dispatch.compat import BUFFERS, PARAMETERS
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_weights import MappedFile

_LOADED = "_drivetrain_accelerate_loaded"  # the attribute of a model by which a load tells the dispatch of its files


@dataclass(kw_only=True)
class WeightSources:
    """The places of a model's weights.

    Attributes:
        mapped: The files of the weights that are mapped pages, by name.
        dtypes: The dtypes that weights are converted to at use, by name.
        in_memory: The names of those that a device map puts on the disk, but that no file holds.
    """

    mapped: dict[str, MappedFile] = field(default_factory=dict[str, MappedFile])
    dtypes: dict[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    in_memory: tuple[str, ...] = ()


def remember_sources(model: nn.Module, sources: WeightSources) -> None:
    """Note where a load has left the weights of a model, for its dispatch."""
    setattr(model, _LOADED, sources)


def fill_from_sources(
    model: nn.Module,
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: str | PathLike[str] | None,
    offload_index: Mapping[str, Entry] | None,
) -> WeightSources:
    """Give the tensors of a model that have no memory their values.

    Args:
        model: The model; changed in place.
        state_dict: Weights in memory.
        offload_dir: The folder of offloaded weights.
        offload_index: The index of offloaded weights; None for that of the folder.

    Returns:
        Where the weights on the disk are.
    """
    layout = ModelLayout.of(model)
    remembered = vars(model).pop(_LOADED, None)
    sources = remembered if isinstance(remembered, WeightSources) else WeightSources()
    given = state_dict is not None or offload_index is not None or offload_dir is not None
    if not given or not any(tensor.is_meta for tensor in layout.tensors.values()):
        return sources
    loader = OffloadedWeightsLoader(dict(state_dict or {}), offload_dir, offload_index)
    for names in layout.aliases:
        known = next((name for name in names if name in loader.all_keys), None)
        if known is not None and layout.tensors[known].is_meta:
            _fill(layout, names, known, loader, sources)
    return sources


def _fill(
    layout: ModelLayout,
    names: tuple[str, ...],
    known: str,
    loader: OffloadedWeightsLoader,
    sources: WeightSources,
) -> None:
    """Put one tensor in place, under every name that it has."""
    old = layout.tensors[known]
    if known in loader.state_dict:
        value = loader.state_dict[known].detach()
    else:
        file, stored = loader.file_of(known)
        value = file.tensor(stored)
        wanted = loader.index[known].get("dtype")
        computed = value.dtype if wanted is None else dtype_named(str(wanted))
        for name in names:
            sources.mapped[name] = file
            if computed != value.dtype:
                sources.dtypes[name] = computed
    is_parameter = isinstance(old, nn.Parameter)
    trains = old.requires_grad and value.is_floating_point()
    new = nn.Parameter(value, requires_grad=trains) if is_parameter else value
    for name in names:
        owner, _, leaf = name.rpartition(".")
        held: dict[str, Tensor] = getattr(layout.modules[owner], PARAMETERS if is_parameter else BUFFERS)
        held[leaf] = new
