"""Weights in host memory that are pages of their file until they are written to, instead of copies of them."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.loading.load_plan import LoadPlan, PlannedTensor


def with_mapped_in_memory(plan: LoadPlan, sources: Mapping[str, LazyTensor]) -> LoadPlan:
    """Return the plan of a load that copies no tensor which the host can use as it is in a safetensors file.

    A write to it copies the page, never into the file. It stays whole if the file is deleted, or replaced as all that
    write safetensors replace files. Files of torch's own are read: `torch.save` writes into the file that it finds.

    Args:
        plan: The plan of the load.
        sources: The source of each tensor, by the plan's stored names.
    """

    def mapped(planned: PlannedTensor) -> PlannedTensor:
        if not _is_kept(planned) or not _fits(planned, sources[planned.stored]):
            return planned
        return replace(planned, reads=(), maps=planned.reads)

    return replace(plan, tensors=tuple(map(mapped, plan.tensors)))


def _is_kept(planned: PlannedTensor) -> bool:
    """Return whether the host gets the whole of a tensor of the file."""
    is_whole = planned.box is None and not planned.is_packed and planned.reads == (planned.stored,)
    return is_whole and planned.place == torch.device("cpu") and planned.dtype == planned.stored_dtype


def _fits(planned: PlannedTensor, source: LazyTensor) -> bool:
    """Return whether a tensor lies in its file as in memory."""
    file = source.mapped_file()
    if file is None or any(file.start_of(each.name) is None for each in source.inputs()):
        return False
    value = source.values()
    is_aligned = value.data_ptr() % value.element_size() == 0
    return value.dtype == planned.dtype and value.is_contiguous() and is_aligned
