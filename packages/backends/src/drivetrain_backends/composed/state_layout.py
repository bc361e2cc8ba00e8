"""The layout of the tensors of models and optimizers over ranks; by default, every rank holds them in full."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.modules.compile import (
    check_plain_state,
    load_plain_state,
    plain_state,
    strip_wrapper_prefix,
)
from drivetrain_backends.state_dict.dtensor import broadcast_parts
from drivetrain_backends.state_dict.optimizer_state import named_state
from drivetrain_state import Context


class StateLayout:
    """The layout of full tensors. A subclass overrides what differs where each rank holds a part.

    Called on all ranks. `model` is the user's module.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    def adopt(self, optimizer: Optimizer) -> None:
        """Have an optimizer hold the parameters of the transformed models, and its state beside them."""
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # which moves it to the parameters' devices

    def open(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] | None = None) -> None:
        """Have modules hold their own parts of the parameters, before a state is read or loaded.

        `optimizers` are those whose state is to be saved, which the layout refuses if it cannot be divided; None if a
        state is to be loaded.
        """

    @contextmanager
    def gathered(self, model: nn.Module, *, write: bool) -> Generator[None]:
        """Gather the full parameters of a model in the block; see `Prepared.gathered`."""
        yield
        if write:
            broadcast_parts(weights_of(model), self.context)

    def chosen(self, model: nn.Module, parameters: Iterable[Tensor] | None) -> list[Tensor]:
        """Return the parameters to clip, as optimizers hold them: the given ones; for None, the model's."""
        return list(weights_of(model) if parameters is None else parameters)

    def parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the parameters of a model by plain name, as optimizers hold them; a tied one by its first name."""
        return {strip_wrapper_prefix(name): p for name, p in nn.Module.named_parameters(model)}

    def norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the gradients of parameters, all of which have one, as one vector; of shape ()."""
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return a model's state dict by plain names; a part of a tensor has `full_tensor()`."""
        return plain_state(model)

    def optimizer_state(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return an optimizer's state by the names of its parameters, in the same form on all ranks."""
        return named_state(optimizer, names)

    def divide(self, saved: Mapping[str, Any], names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        """Return an optimizer's saved state, whose tensors are full or divided in any way, in this layout."""
        del names
        return saved

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a model's saved state; refuse one of another model before any change."""
        check_plain_state(model, state)
        load_plain_state(model, state)


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a module, even if the module overrides `parameters` and leaves some out."""
    return [parameter for _, parameter in nn.Module.named_parameters(module)]
