"""Give a model tensors without data, and explain what cannot run on them."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain_dispatch.compat import BUFFERS, DATA_DEPENDENT_ERRORS, PARAMETERS
from drivetrain_dispatch.errors import CostError
from drivetrain_plan.compat import FakeTensor


@contextmanager
def explain_errors(model: nn.Module) -> Generator[None]:
    """Raise the block's errors as a CostError that says whether it needed the values of tensors."""
    try:
        yield
    except CostError:
        raise
    except Exception as error:
        depends = isinstance(error, DATA_DEPENDENT_ERRORS)
        what = "its forward depends on the values of tensors, which a step without data does not have"
        first = (str(error) if isinstance(error, RuntimeError) and str(error) else repr(error)).splitlines()[
            0
        ]
        raise CostError(
            f"{type(model).__name__}: {what if depends else 'a step without data fails'} ({first})"
        ) from error


def give_fake_tensors(model: nn.Module) -> None:
    """Exchange a model's meta tensors for fake ones of the CPU, in a `FakeTensorMode`; tied ones stay tied.

    FSDP's shards stay, which `to_empty` has exchanged.
    """
    # Autocast passes over meta tensors, and attention takes its slowest kernel for them, which holds all scores.
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, whose id is free otherwise
    for module in model.modules():
        entries: Any
        for entries in (vars(module)[PARAMETERS], vars(module)[BUFFERS], vars(module)):
            for name, tensor in entries.items():
                if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor | DTensor):
                    if id(tensor) not in made:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, tensor.requires_grad)
                        made[id(tensor)] = tensor, fake
                    entries[name] = made[id(tensor)][1]
