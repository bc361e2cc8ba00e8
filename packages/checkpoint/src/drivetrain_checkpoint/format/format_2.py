"""Read the tensors of a manifest of format 2, which lists the pieces of each tensor with their places.

```text
{"tensors": {part: {name: {"dtype": name, "shape": [sizes], "pieces": [[file, first byte, offsets, sizes], ...]}}}}
```
"""

from collections.abc import Mapping
from typing import Any

from drivetrain_checkpoint.format.division import Division
from drivetrain_checkpoint.format.layout import rank_of_file, tensor_file
from drivetrain_weights.safetensors_layout import DTYPES
from drivetrain_weights.tensor_box import Box


def from_format_2(
    content: Mapping[str, Any],
) -> tuple[dict[str, dict[str, Division]], dict[str, dict[str, int]]]:
    """Return the division of each tensor by part and name, and its first byte by file and name. Pure."""
    shared: dict[object, Division] = {}
    starts: dict[str, dict[str, int]] = {}
    tensors: dict[str, dict[str, Division]] = {}
    for part, described in content["tensors"].items():
        tensors[part] = {}
        for name, tensor in described.items():
            one, first = _division(part, name, tensor, content)
            key = (one.dtype, one.shape, tuple(one.boxes.items()))
            tensors[part][name] = shared.setdefault(key, one)
            for file, start in first.items():
                starts.setdefault(file, {})[name] = start
    return tensors, starts


def _division(
    part: str, name: str, tensor: Mapping[str, Any], content: Mapping[str, Any]
) -> tuple[Division, dict[str, int]]:
    """Return the division of a tensor, and its first byte in each file."""
    item_bytes = DTYPES[tensor["dtype"]].itemsize if tensor["dtype"] in DTYPES else 1
    boxes: dict[int, tuple[Box, ...]] = {}
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for file, start, offsets, sizes in sorted(tensor["pieces"], key=lambda piece: piece[:2]):
        box, rank = Box(tuple(offsets), tuple(sizes)), rank_of_file(file)
        end = start + box.num_elements * item_bytes
        fits = file in content["files"] and 0 <= start <= end <= content["files"][file]["size_bytes"]
        if rank is None or file != tensor_file(part, rank, content["attempt"]) or not fits:
            raise ValueError(f"{part}: {name!r} lies from byte {start} on in {file}, which is too short")
        if ends.get(file, start) != start:
            raise ValueError(f"{part}: {name!r} lies in two places of {file}")
        starts.setdefault(file, start)
        ends[file] = end
        boxes[rank] = (*boxes.get(rank, ()), box)
    return Division(tensor["dtype"], item_bytes, tuple(tensor["shape"]), boxes), starts
