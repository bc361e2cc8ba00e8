"""Private names of torch that this package uses, each with a test and a row in docs/platforms.md."""

import torch


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values that a sparse COO tensor stores.

    The public methods refuse a tensor with repeated entries, such as the gradient of a sparse embedding, and
    coalescing it would copy it.
    """
    return tensor._indices(), tensor._values()
