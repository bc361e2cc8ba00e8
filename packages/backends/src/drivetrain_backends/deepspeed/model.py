"""What the user calls in place of a model that a DeepSpeed engine trains."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn


class EngineModel(nn.Module):
    """Runs the forward through the engine while the model is trained, and past it while all of it is frozen.

    A frozen model that a loss merely passes through, as a discriminator is in the generator's step, must stay out of
    its engine: the engine would take the passing gradients for its own.

    Args:
        engine: The DeepSpeed engine.
        on_gradient: Called when a backward reaches an output of the engine.

    Attributes:
        module: The user's module.
        engine: The DeepSpeed engine, for what has no counterpart here, such as `save_checkpoint`.
    """

    def __init__(self, engine: Any, on_gradient: Callable[["EngineModel"], None]) -> None:
        super().__init__()
        self.module: nn.Module = engine.module
        self.__dict__["engine"] = engine  # no child module: its parameters are the module's
        self.engine: Any
        self._on_gradient = on_gradient

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return self.module(*inputs, **kwargs)
        output = self.engine(*inputs, **kwargs)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._notice)
        return output

    def _notice(self, _: Tensor) -> None:
        self._on_gradient(self)


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a nested output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in cast("Mapping[Any, Any]", output).values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in cast("list[Any]", output):
            yield from _tensors(value)
