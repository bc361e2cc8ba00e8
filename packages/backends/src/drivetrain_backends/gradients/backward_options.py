"""The arguments of torch's `backward`, as one value."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackwardOptions:
    """The arguments of torch's `backward` of a loss.

    Attributes:
        retain_graph: Whether the graph is kept for another backward.
        create_graph: Whether the gradients have a graph of their own, for derivatives of them; it keeps the graph.
        inputs: The leaves that get gradients; None for all.
    """

    retain_graph: bool = False
    create_graph: bool = False
    inputs: tuple[Tensor, ...] | None = None

    @property
    def said(self) -> str:
        """The arguments that are not the defaults, for messages; empty without any."""
        found = {"retain_graph=True": self.retain_graph, "create_graph=True": self.create_graph}
        return ", ".join([name for name, is_said in found.items() if is_said] + self._said_inputs())

    def run(self, loss: Tensor) -> None:
        """Run torch's backward of a loss."""
        loss.backward(
            retain_graph=self.retain_graph or self.create_graph,
            create_graph=self.create_graph,
            inputs=self.inputs,
        )

    def _said_inputs(self) -> list[str]:
        return [] if self.inputs is None else [f"inputs=({len(self.inputs)} tensors)"]


ONCE = BackwardOptions()
