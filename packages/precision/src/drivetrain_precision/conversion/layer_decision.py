"""The decision about a layer: whether it is converted, and why not."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDecision:
    """The decision about a module that has parameters of its own.

    Attributes:
        name: The module's first name in the model.
        kind: The name of its class.
        shape: The shape of its weight, (out_features, in_features) for a linear layer; empty without a weight.
        is_linear: Whether it is an nn.Linear or of a subclass.
        reason: The reason why it stays as it is; empty if it is converted.
        fused_with: The name of the layer that is computed with it: a norm's linear layer, a linear layer's norm.
        unfused: The reason why a norm that is converted, and was to be computed with a linear layer, is not.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    is_linear: bool
    reason: str = ""
    fused_with: str = ""
    unfused: str = ""

    @property
    def converts(self) -> bool:
        return not self.reason
