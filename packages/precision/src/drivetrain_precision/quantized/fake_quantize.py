"""Let linear layers round their weights and inputs in training as quantised inference will."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.class_exchange import exchange_class, undo_exchange
from drivetrain_precision.fp8.conversion_plan import LayerDecision, plan_conversion
from drivetrain_precision.fp8.layer_filter import LayerFilter
from drivetrain_precision.quantized.scheme import QuantizedScheme

_SCHEME = "quantized_scheme"


@dataclass(frozen=True, slots=True, kw_only=True)
class QATReport:
    """The decision of `prepare_qat` for each module that has parameters of its own.

    Attributes:
        scheme: The bits and groups of the layers.
        layers: A decision for each module, in the order of the model.
    """

    scheme: QuantizedScheme
    layers: tuple[LayerDecision, ...]

    @property
    def prepared(self) -> tuple[str, ...]:
        """The names of the layers that compute with rounded weights now."""
        return tuple(each.name for each in self.layers if each.converts)

    def __str__(self) -> str:
        reasons = Counter(each.reason for each in self.layers if not each.converts)
        lines = [f"{len(self.prepared)} of {len(self.layers)} layers train for {self.scheme}; the others:"]
        return "\n".join([*lines, *(f"  {count:>5}  {reason}" for reason, count in reasons.most_common())])


def prepare_qat(model: nn.Module, scheme: QuantizedScheme, filter: LayerFilter | None = None) -> QATReport:
    """Let linear layers round their weights and inputs as quantised inference will, in place.

    Weights stay what they are, with their names and optimizers, and learn to be rounded: gradients pass the rounding
    as if it were not there. Checkpoints are those of a plain model. Called on all ranks, before the model is
    prepared.

    Args:
        model: The model; its layers are not divided among ranks yet.
        scheme: The bits and groups of the export.
        filter: The layers to quantise; None for all but the last linear layer.

    Returns:
        The report of every module with parameters of its own.

    Raises:
        PrecisionError: No layer would be quantised, a pattern matches nothing, or a layer rounds its weight already.
            The model is left as it was.
        ImportError: torchao is missing or too old.
    """
    if (first := next(fake_quantized(model), None)) is not None:
        raise PrecisionError(
            f"{first[0] or type(model).__name__} rounds its weight already ({scheme_of(first[1])}); "
            "undo_qat(model) first gives the plain layers back"
        )
    config = scheme.config()
    decisions = plan_conversion(model, scheme, filter or LayerFilter(skip_first=False))
    report = QATReport(scheme=scheme, layers=decisions)
    if not report.prepared:
        raise PrecisionError(_nothing(model, report))
    for name in report.prepared:
        _prepare(cast("nn.Linear", model.get_submodule(name)), scheme, config)
    return report


def undo_qat(model: nn.Module) -> tuple[str, ...]:
    """Let the layers of a model compute with their weights as they are again, in place.

    Returns:
        The names of the layers that rounded their weights.
    """
    found = tuple(fake_quantized(model))
    for _, module in found:
        undo_exchange(module)
    return tuple(name for name, _ in found)


def fake_quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and layers that round their weights as `prepare_qat` said."""
    return ((name, each) for name, each in model.named_modules() if _SCHEME in vars(each))


def scheme_of(module: nn.Module) -> QuantizedScheme:
    """Return how a layer that `fake_quantized` yields is quantised."""
    return getattr(module, _SCHEME)


def _prepare(module: nn.Linear, scheme: QuantizedScheme, config: Any) -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig, QATStep

    with torch.device("meta"):
        # quantize_ exchanges the layers of a parent.
        parent = nn.Sequential(nn.Linear(module.in_features, module.out_features, bias=False))
    quantize_(parent, QATConfig(config, step=QATStep.PREPARE))
    made = parent[0]
    setattr(made, _SCHEME, scheme)
    exchange_class(module, made, owner="qat")


def _nothing(model: nn.Module, report: QATReport) -> str:
    linear = [each for each in report.layers if not each.reason.endswith("not nn.Linear")]
    shown = "; ".join(f"{each.name or type(model).__name__} {each.reason}" for each in linear[:8])
    return (
        f"{report.scheme}: no layer of {type(model).__name__} can be quantised: {shown or 'it has no nn.Linear'}. "
        "Give LayerFilter what to quantise (skip_last=False, other patterns), or another group_size"
    )
