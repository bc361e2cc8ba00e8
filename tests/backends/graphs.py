"""What torch.compile makes of a model: how many graphs, and how many calls in them."""

from collections.abc import Callable

import torch
from torch.fx import GraphModule


class Graphs:
    """A compiler that runs graphs as they are, and counts them and the calls in them, but autocast's."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_calls = 0

    def __call__(self, graph: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        self.num_graphs += 1
        targets = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
        self.num_calls += sum("autocast" not in getattr(target, "__name__", "") for target in targets)
        return graph.forward
