"""Read the tensors of a manifest of format 2, which lists the pieces of each tensor with their places.

```text
{"tensors": {part: {name: {"dtype": name, "shape": [sizes], "pieces": [[file, first byte, offsets, sizes], ...]}}}}
```
"""

from collections.abc import Mapping
from typing import Any, cast

from drivetrain_checkpoint.format.division import Division
from drivetrain_checkpoint.format.layout import rank_of_file, tensor_file
from drivetrain_weights.safetensors_layout import DTYPES
from drivetrain_weights.tensor_box import Box


def from_format_2(
    content: Mapping[str, Any],
) -> tuple[dict[str, dict[str, Division]], dict[str, dict[str, int]]]:
    """Return the division of each tensor by part and name, and its first byte by file and name. Pure.

    Raises:
        ValueError: A piece lies outside of its file, or not behind the one before it.
    """
    divisions: dict[object, Division] = {}
    starts: dict[str, dict[str, int]] = {}
    tensors: dict[str, dict[str, Division]] = {part: {} for part in content["tensors"]}
    for part, described in cast("dict[str, dict[str, Any]]", content["tensors"]).items():
        for name, tensor in described.items():
            boxes: dict[int, list[Box]] = {}
            item_bytes = DTYPES[tensor["dtype"]].itemsize if tensor["dtype"] in DTYPES else 1
            ends: dict[str, int] = {}
            for file, start, offsets, sizes in sorted(tensor["pieces"], key=lambda piece: piece[:2]):
                rank = rank_of_file(file)
                box = Box(tuple(offsets), tuple(sizes))
                end = start + box.num_elements * item_bytes
                if (
                    rank is None
                    or file != tensor_file(part, rank, content["attempt"])
                    or file not in content["files"]
                    or not 0 <= start <= end <= content["files"][file]["size_bytes"]
                ):
                    raise ValueError(
                        f"{part}: {name!r} lies from byte {start} on in {file}, which does not reach so far"
                    )
                if ends.setdefault(file, start) != start:
                    raise ValueError(f"{part}: {name!r} lies in two places of {file}")
                ends[file] = end
                starts.setdefault(file, {}).setdefault(name, start)
                boxes.setdefault(rank, []).append(box)
            by_rank = {rank: tuple(found) for rank, found in boxes.items()}
            key = (tensor["dtype"], tuple(tensor["shape"]), tuple(by_rank.items()))
            tensors[part][name] = divisions.setdefault(
                key, Division(tensor["dtype"], item_bytes, key[1], by_rank)
            )
    return tensors, starts
