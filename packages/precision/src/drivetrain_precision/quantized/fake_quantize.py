"""Make linear layers round their weights and inputs in training as quantised inference will."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn

from drivetrain_precision.compat import unwrap_compiled
from drivetrain_precision.conversion.class_exchange import exchange_class, undo_exchange
from drivetrain_precision.conversion.conversion_plan import plan_conversion
from drivetrain_precision.conversion.layer_changes import change_layers
from drivetrain_precision.conversion.layer_filter import LayerFilter
from drivetrain_precision.conversion.layer_report import LayerReport
from drivetrain_precision.conversion.library_check import NeededLibrary, check_library
from drivetrain_precision.errors import PrecisionError

_SCHEME = "quantized_scheme"
_NEEDED = NeededLibrary(library="torchao", version="0.18", extra="torchao")

_TRAINED = "torchao.prototype.quantized_training."


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedScheme:
    """The bits and groups of linear layers in quantized inference.

    Weights are symmetric integers with a scale for each group. Activations are quantized separately for each token.

    Attributes:
        weight_bits: The bits of a weight.
        group_size: The number of weights of a row that share a scale, 32 or more; None for the whole row.
        activations: "int8" quantizes the input of each layer too; "full" keeps the input in full precision.
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
        """Return why a linear layer cannot be quantized by this scheme, or None if it can."""
        features = module.in_features
        if self.group_size is not None and isinstance(features, int) and features % self.group_size:
            return f"has in_features={features}, which is not divisible by group_size={self.group_size}"
        return None

    def config(self) -> Any:
        """Return torchao's configuration of the quantized layer; ImportError if torchao is missing or too old."""
        if (missing := check_library(_NEEDED)) is not None:
            raise ImportError(f"{self} needs torchao: {missing}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QATReport(LayerReport):
    """A report of the layers that `prepare_qat` makes compute with rounded weights, with reasons for the others."""

    scheme: QuantizedScheme

    @property
    def prepared(self) -> tuple[str, ...]:
        """The names of the layers that compute with rounded weights now."""
        return self.converted

    def __str__(self) -> str:
        return self.counts(f"train for {self.scheme}")


def prepare_qat(model: nn.Module, scheme: QuantizedScheme, filter: LayerFilter | None = None) -> QATReport:
    """Make linear layers round weights and inputs as quantized inference will, in place, and report on each layer.

    Weights keep their dtype, names and optimizers, and training adapts them to rounding: gradients pass through the
    rounding unchanged. Checkpoints are the same as a plain model's. Called on all ranks, before the model is
    prepared.

    Args:
        model: The model; its layers must not be divided among ranks yet.
        scheme: The bits and groups of the export.
        filter: The layers to quantize; None for all but the last linear layer.

    Raises:
        PrecisionError: No layer would be quantized, a pattern matches nothing, or a layer already rounds its weight.
            The model is unchanged.
        ImportError: torchao is missing or too old.
    """
    model = unwrap_compiled(model)
    if (first := next(fake_quantized(model), None)) is not None:
        raise PrecisionError(
            f"{first[0] or type(model).__name__} rounds its weight already ({scheme_of(first[1])}); "
            "undo_qat(model) first gives the plain layers back"
        )
    config = scheme.config()
    decisions = plan_conversion(model, scheme, filter or LayerFilter(skip_first=False))
    report = QATReport(scheme=scheme, layers=decisions)
    if not report.prepared:
        raise PrecisionError(
            f"{scheme}: no layer of {type(model).__name__} can be quantised: {report.refusals(model)}. "
            "Give LayerFilter what to quantise (skip_last=False, other patterns), or another group_size"
        )
    change_layers(model, report.prepared, partial(_prepare, scheme=scheme, config=config), undo_exchange)
    return report


def undo_qat(model: nn.Module) -> tuple[str, ...]:
    """Restore in place the layers that round weights to plain layers, and return the names of the restored layers."""
    found = tuple(fake_quantized(unwrap_compiled(model)))
    for _, module in found:
        undo_exchange(module)
    return tuple(name for name, _ in found)


def fake_quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the layer for each layer that rounds its weight by `prepare_qat`."""
    return ((name, each) for name, each in model.named_modules() if _SCHEME in vars(each))


def scheme_of(module: nn.Module) -> QuantizedScheme:
    """Return the quantization scheme of a layer that `fake_quantized` yields."""
    return getattr(module, _SCHEME)


def _prepare(module: nn.Module, scheme: QuantizedScheme, config: Any) -> nn.Module:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig, QATStep

    linear = cast("nn.Linear", module)
    with torch.device("meta"):
        # quantize_ exchanges the layers of a parent.
        parent = nn.Sequential(nn.Linear(linear.in_features, linear.out_features, bias=False))
    quantize_(parent, QATConfig(config, step=QATStep.PREPARE))
    made = parent[0]
    setattr(made, _SCHEME, scheme)
    return exchange_class(module, made, owner="qat")


def check_trained_weights(model: nn.Module) -> None:
    """Raise PrecisionError for trained weights of torchao's prototype for quantized training."""
    # Torch's optimizers lack operations on int8 weights, DDP and FSDP2 cannot send or divide them (torchao 0.18), and
    # a checkpoint could not hold them.
    for name, parameter in model.named_parameters():
        kind = type(parameter.data)
        if kind.__module__.startswith(_TRAINED) and parameter.requires_grad:
            raise PrecisionError(
                f"{name} is trained as a {kind.__name__} of torchao: under no backend can it be trained and saved. "
                "Train weights that stay plain: prepare_qat(model, QuantizedScheme(weight_bits=8)) for int8 "
                "inference, int8_mixed_precision_training(module_swap=True) of torchao for products in int8"
            )
