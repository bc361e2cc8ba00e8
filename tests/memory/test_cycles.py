import gc

import torch

from drivetrain_memory.leaks.cycles import collect_cycles


class Node:
    """An object that may refer to itself."""

    tensors: tuple[torch.Tensor, ...]
    itself: "Node"


def test_a_cycle_that_holds_a_sparse_tensor_is_counted_without_it() -> None:
    gc.collect()
    node = Node()
    node.tensors = (torch.ones(100), torch.eye(2).to_sparse())
    node.itself = node
    del node
    assert [cycle.tensor_bytes for cycle in collect_cycles() if "Node" in cycle.types] == [400]
