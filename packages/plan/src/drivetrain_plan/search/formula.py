"""The figures of a model whose program cannot run without data, from its sizes alone. Pure."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from drivetrain_plan.choice import Checkpointing
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.search.model_figures import BatchFigures

# Bytes that a block keeps of each token, in half precision, as multiples of its width: with fused attention, of the
# usual blocks (Korthikanti et al., 2022); with its input and products alone; and with its input alone.
_KEPT: Mapping[Checkpointing, int] = MappingProxyType({"none": 34, "selective": 22, "full": 2})


def formula_figures(
    model: nn.Module, num_tokens: int, num_parameters: int, kinds: Iterable[Checkpointing]
) -> dict[str, Any]:
    """Return fields of `ModelFigures` by the usual estimates: Adam's states, and activations by width and depth."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    num_blocks = max(map(len, lists), default=1)
    width = max((p.shape[-1] for p in model.parameters() if p.dim() == 2), default=1)
    weights = float(sum(p.numel() * p.itemsize for p in model.parameters()))
    trained = float(sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad))

    def of(kept: int) -> BatchFigures:
        activations = float(kept * num_tokens * width * num_blocks)
        sample = StepFigures(
            activations=activations,
            forward=activations,
            early=activations,
            computing=activations,
            flops=6.0 * num_parameters * num_tokens,
            moved=4 * activations,
        )
        lasting = StepFigures(
            weights=weights,
            gradients=trained,
            states=2 * trained,
            late=trained,
            stepping=trained,
            stepped=5 * trained,
        )
        return BatchFigures(first=lasting.plus(sample), further=sample)

    def halved(batches: BatchFigures) -> BatchFigures:
        first = batches.first
        gathered = 0.0 if num_blocks < 2 else weights / num_blocks * 2
        first = first.changed(
            weights=first.weights / 2,
            gradients=first.gradients / 2,
            states=first.states / 2,
            stepping=first.stepping / 2,
            stepped=first.stepped / 2,
            forward=first.forward + gathered,
            early=first.early + gathered,
            late=trained / 2 + gathered,
            computing=first.computing + gathered,
        )
        return BatchFigures(first=first, further=batches.further)

    return {
        "plain": of(_KEPT["none"]),
        "unsharded": {kind: of(_KEPT[kind]) for kind in kinds},
        "sharded": {kind: halved(of(_KEPT[kind])) for kind in kinds},
        "basis": "formula",
    }
