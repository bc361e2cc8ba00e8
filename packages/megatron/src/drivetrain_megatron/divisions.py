"""The parts of a model of Megatron's layers that a rank holds: cuts of tensors, by its `sharded_state_dict`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from drivetrain_megatron.library import ShardedTensor, ShardedTensorFactory, parallel_state
from drivetrain_parallel import Cut
from drivetrain_weights import Box


def find_cuts(model: nn.Module, *, rank: int, size: int) -> dict[Tensor, Cut]:
    """Return the cut of each parameter that ranks divide. Ranks of a tensor axis find the same.

    Args:
        model: A model of Megatron's layers; what it holds whole is left out.
        rank: The place of this rank among those that divide layers.
        size: The number of these ranks.

    Raises:
        ValueError: A tensor is divided in a way that no cut describes.
    """
    if size == 1:
        return {}
    described = {each.data: each for each in _described(model) if hasattr(each, "data")}
    found: dict[Tensor, Cut] = {}
    for name, parameter in model.named_parameters():
        boxes = list(held_boxes(described[parameter])) if parameter in described else []
        cut = cut_of(boxes, parameter.shape, rank=rank, size=size, name=name) if boxes else None
        # A layer that describes no boxes, or a plain module around it, may mark its parameters alone.
        if cut is None and getattr(parameter, "tensor_model_parallel", False):
            cut = marked_cut(parameter, size)
        if cut is not None:
            found[parameter] = cut
    return found


def _described(module: nn.Module) -> Iterator[Any]:
    """Yield what modules say of their tensors; plain modules are walked through."""
    describe: Any = getattr(module, "sharded_state_dict", None)
    if describe is not None:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        yield from describe(metadata={"dp_cp_group": replicas}).values()
        return
    for child in module.children():
        yield from _described(child)


def held_boxes(described: Any) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield the boxes of what is held, in the order of its rows, each with the shape of the whole tensor."""
    if isinstance(described, ShardedTensorFactory):
        described = described.build()
    if isinstance(described, ShardedTensor):
        start = described.prepend_axis_num  # axes of layers and experts, which have names of their own here
        offsets, shape = described.global_offset[start:], described.global_shape[start:]
        yield Box(tuple(offsets), tuple(described.local_shape)), tuple(shape)
    elif isinstance(described, Mapping | Sequence):
        for each in described.values() if isinstance(described, Mapping) else described:
            yield from held_boxes(each)


def cut_of(
    boxes: Sequence[tuple[Box, tuple[int, ...]]], shape: Sequence[int], *, rank: int, size: int, name: str
) -> Cut | None:
    """Return the cut whose part on this rank is these boxes; None for a whole tensor.

    Args:
        boxes: The boxes that this rank holds, in the order in which its tensor joins them.
        shape: The shape of this rank's tensor.
        rank: The place of this rank among `size` ranks.
        size: The number of ranks that divide the tensor.
        name: The name of the tensor, for the error.

    Example:
        >>> halves = [(Box((2, 0), (2, 8)), (8, 8)), (Box((6, 0), (2, 8)), (8, 8))]
        >>> cut_of(halves, (4, 8), rank=1, size=2, name="gate_up")
        Cut(dim=0, pieces=(4, 4), num_units=2)
    """
    (_, whole), *_ = boxes
    divided = [dim for dim, (own, all_) in enumerate(zip(shape, whole, strict=True)) if own != all_]
    if not divided:
        return None
    dim = divided[0]
    cut = Cut(dim=dim, pieces=tuple(box.sizes[dim] * size for box, _ in boxes), num_units=size)
    held = [(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box, _ in boxes]
    if len(divided) > 1 or cut.num_elements != whole[dim] or tuple(held) != cut.ranges(rank, size):
        raise ValueError(
            f"{name}: this rank of {size} holds {[box for box, _ in boxes]} of shape {tuple(whole)}, and each rank "
            "must hold an equal run of one dimension, or of each of its pieces: correct the sharded_state_dict() of "
            "its layer"
        )
    return cut


def marked_cut(parameter: nn.Parameter, size: int) -> Cut:
    """Return the cut of a parameter by the marks that Megatron's layers set."""
    marks: Any = parameter
    dim, num_pieces = int(marks.partition_dim), int(marks.partition_stride)
    piece = parameter.shape[dim] * size // num_pieces
    return Cut(dim=dim, pieces=(piece,) * num_pieces, num_units=size)
