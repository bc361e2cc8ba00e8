"""Let linear layers round their weights and inputs in training as quantised inference will."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from drivetrain_precision.compat import unwrap_compiled
from drivetrain_precision.conversion.class_exchange import exchange_class, undo_exchange
from drivetrain_precision.conversion.conversion_plan import plan_conversion
from drivetrain_precision.conversion.layer_changes import change_layers
from drivetrain_precision.conversion.layer_filter import LayerFilter
from drivetrain_precision.conversion.layer_report import LayerReport
from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.quantized.scheme import QuantizedScheme

_SCHEME = "quantized_scheme"


@dataclass(frozen=True, slots=True, kw_only=True)
class QATReport(LayerReport):
    """A report of which layers `prepare_qat` lets compute with rounded weights, and why not the others."""

    scheme: QuantizedScheme

    @property
    def prepared(self) -> tuple[str, ...]:
        """The names of the layers that compute with rounded weights now."""
        return self.converted

    def __str__(self) -> str:
        return self.counts(f"train for {self.scheme}")


def prepare_qat(model: nn.Module, scheme: QuantizedScheme, filter: LayerFilter | None = None) -> QATReport:
    """Let linear layers round their weights and inputs as quantized inference will, in place, and report on each.

    Weights stay what they are, with their names and optimizers, and learn to be rounded: gradients pass the rounding
    as if it were not there. Checkpoints are those of a plain model. Called on all ranks, before the model is
    prepared.

    Args:
        model: The model; its layers are not divided among ranks yet.
        scheme: The bits and groups of the export.
        filter: The layers to quantize; None for all but the last linear layer.

    Raises:
        PrecisionError: No layer would be quantized, a pattern matches nothing, or a layer rounds its weight already.
            The model is left as it was.
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
    change_layers(model, report.prepared, partial(_prepare, scheme=scheme, config=config), _undo)
    return report


def undo_qat(model: nn.Module) -> tuple[str, ...]:
    """Let the layers of a model compute with their weights as they are again, in place, and return their names."""
    found = tuple(fake_quantized(unwrap_compiled(model)))
    for _, module in found:
        _undo(module)
    return tuple(name for name, _ in found)


def fake_quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and layers that round their weights as `prepare_qat` said."""
    return ((name, each) for name, each in model.named_modules() if _SCHEME in vars(each))


def scheme_of(module: nn.Module) -> QuantizedScheme:
    """Return how a layer that `fake_quantized` yields is quantized."""
    return getattr(module, _SCHEME)


def _undo(module: nn.Module) -> nn.Module:
    undo_exchange(module)
    return module


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
    exchange_class(module, made, owner="qat")
    return module
