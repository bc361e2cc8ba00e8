"""The parameters of a model by block and dtype, from the model or from the headers of its files."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import nn

from drivetrain_weights import open_weights

# The number in the name of one of several files: a rank's of a checkpoint, or a shard's.
_NUMBER = re.compile(r"(?<=\.r)\d+(?=(\.\d+)?\.safetensors$)|(?<=-)\d+(?=-of-\d+\.)")
# Bits of a parameter by the name of its dtype; the packed ones without their scales, a percent or two more.
_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """The number of a model's parameters, and their bytes in each dtype."""

    model: str
    num_parameters: int  # the number of parameters; tied ones count once
    largest_block: str
    largest_block_parameters: int

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """The bytes of all parameters in each dtype."""
        return {name: self.num_parameters * bits // 8 for name, bits in _BITS.items()}


def sizes_of_model(model: nn.Module, block_classes: Collection[str]) -> WeightSizes:
    """Count a model's parameters; modules of `block_classes` are moved as a whole."""
    blocks: dict[str, int] = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if type(module).__name__ in block_classes or not list(module.children())
    }
    return _find_largest(type(model).__name__, sum(each.numel() for each in model.parameters()), blocks)


def sizes_of_files(path: Path) -> WeightSizes:
    """Count the tensors in files of weights by their headers; a number in a name marks a block."""
    blocks: dict[str, int] = defaultdict(int)
    for name, file in open_weights(path).items():
        # A block's name ends with the first number, "model.layers.3"; else it is the module's.
        parts = name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
        blocks[".".join(parts[: at + 1])] += prod(file.tensor_shape(name))
    num_files = len(list(path.parent.glob(_NUMBER.sub("*", path.name))))
    name = f"{path.name}, 1 of {num_files} files of the weights" if num_files > 1 else path.name
    return _find_largest(name, sum(blocks.values()), blocks)


def _find_largest(model: str, num_parameters: int, blocks: Mapping[str, int]) -> WeightSizes:
    """Return the sizes of a model; `blocks` has the number of parameters of each block."""
    largest = max(blocks, key=lambda name: blocks[name], default="")
    return WeightSizes(
        model=model,
        num_parameters=num_parameters,
        largest_block=largest,
        largest_block_parameters=blocks.get(largest, 0),
    )
