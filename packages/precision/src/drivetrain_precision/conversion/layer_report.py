"""A report on the conversion of each layer of a model, with a summary in words."""

from collections import Counter
from dataclasses import dataclass

from torch import nn

_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDecision:
    """The decision about a module that directly holds parameters."""

    name: str  # its first name in the model
    kind: str  # the name of its class
    # Of its weight, (out_features, in_features) for a linear layer; empty without a weight.
    shape: tuple[int, ...]
    is_linear: bool  # an nn.Linear or of a subclass
    reason: str = ""  # why it stays as it is; empty if it is converted
    fused_with: str = ""  # the layer that is computed with it: a norm's linear layer, a linear layer's norm
    unfused: str = ""  # why a converted norm that was to be computed with a linear layer is not

    @property
    def converts(self) -> bool:
        """True if the module is converted."""
        return not self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """The decision for each module that directly holds parameters, in the order of the model."""

    layers: tuple[LayerDecision, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """The names of the layers that are converted."""
        return tuple(each.name for each in self.layers if each.converts)

    @property
    def converted_linear(self) -> tuple[str, ...]:
        """The names of the linear layers that are converted."""
        return tuple(each.name for each in self.layers if each.converts and each.is_linear)

    def counts(self, converted: str) -> str:
        """Return a text with the number of converted layers, and of the others by reason.

        `converted` says what converted layers do, such as "compute in fp8".
        """
        reasons = Counter(each.reason for each in self.layers if not each.converts)
        first = f"{len(self.converted)} of {len(self.layers)} layers {converted}; the others:"
        return "\n".join([first, *(f"  {count:>5}  {reason}" for reason, count in reasons.most_common())])

    def refusals(self, model: nn.Module) -> str:
        """Return why the first few linear layers of the model are not converted."""
        linear = [
            f"{each.name or type(model).__name__} {each.reason}" for each in self.layers if each.is_linear
        ]
        more = f"; and {len(linear) - _MOST_SHOWN} more" if len(linear) > _MOST_SHOWN else ""
        # Modules with matrices would be linear layers, were they nn.Linear, as GPT-2's Conv1D.
        matrices = [each for each in self.layers if not each.is_linear and len(each.shape) == 2]
        kinds = Counter(each.kind for each in matrices if "Embedding" not in each.kind)
        alike = [
            f"{count} modules of class {kind} are not nn.Linear"
            if count > 1
            else f"1 module of class {kind} is not nn.Linear"
            for kind, count in kinds.items()
        ]
        return "; ".join([*alike, *(linear[:_MOST_SHOWN] or ["it has no nn.Linear"])]) + more
