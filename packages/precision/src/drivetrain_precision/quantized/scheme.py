"""The bits and groups of a quantised layer."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from drivetrain_precision.conversion.library_check import NeededLibrary, check_library
from drivetrain_precision.errors import PrecisionError

_NEEDED = NeededLibrary(library="torchao", version="0.18", extra="torchao")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedScheme:
    """The bits and groups of linear layers in quantized inference.

    Weights are symmetric integers with a scale for each group, activations are quantized anew for each token.

    Attributes:
        weight_bits: The bits of a weight.
        group_size: The number of weights of a row that share a scale, 32 or more; None for the whole row.
        activations: "int8" quantizes the input of each layer too; "full" keeps it.
    """

    weight_bits: Literal[4, 8] = 4
    group_size: int | None = 32
    activations: Literal["int8", "full"] = "int8"

    def __post_init__(self) -> None:
        """Raise PrecisionError for a value outside its range."""
        if self.weight_bits not in (4, 8):
            raise PrecisionError(f"weight_bits={self.weight_bits!r}: must be 4 or 8")
        if self.activations not in ("int8", "full"):
            raise PrecisionError(f"activations={self.activations!r}: must be 'int8' or 'full'")
        if self.group_size is not None and (self.group_size < 32 or self.group_size % 2):
            raise PrecisionError(
                f"group_size={self.group_size!r}: must be an even number from 32 on, or None for a scale per row"
            )

    def refusal(self, module: nn.Module) -> str | None:
        """Return why a linear layer cannot be quantized so, or None if it can."""
        features = module.in_features
        if self.group_size is not None and isinstance(features, int) and features % self.group_size:
            return f"has in_features={features}, which is not divisible by group_size={self.group_size}"
        return None

    def config(self) -> Any:
        """Return torchao's configuration of the quantized layer; ImportError if torchao is missing or too old."""
        if (missing := check_library(_NEEDED)) is not None:
            raise ImportError(f"{self} needs torchao: {missing}")
        import torch
        from torchao.quantization import (
            Int8DynamicActivationIntxWeightConfig,
            IntxWeightOnlyConfig,
            PerAxis,
            PerGroup,
        )

        dtype: Any = getattr(torch, f"int{self.weight_bits}")  # torch.int4 is missing from its stubs
        grain = PerAxis(0) if self.group_size is None else PerGroup(self.group_size)
        if self.activations == "int8":
            return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=grain)
        return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=grain)
