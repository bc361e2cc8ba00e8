"""The module that a user calls in place of a model that a DeepSpeed engine trains."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from drivetrain_backends.modules.module_proxy import ModuleProxy
from drivetrain_deepspeed.compat import call_before_backward


class EngineModel(ModuleProxy):
    """A wrapper whose forward runs through the engine, but bypasses the engine while the model is frozen.

    A frozen model in the path of a loss, such as a discriminator in the generator's step, must bypass its engine: the
    engine would use the passing gradients for the frozen model. `on_gradient` gets the user's module when a backward
    reaches an output of the engine.
    """

    def __init__(self, engine: Any, on_gradient: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.module: nn.Module = engine.module
        self.__dict__["engine"] = engine  # not registered as a child: its parameters are the module's
        # The DeepSpeed engine, for methods without a counterpart here, such as `save_checkpoint`.
        self.engine: Any
        self._on_gradient = on_gradient
        self.__dict__["explain"] = None
        # A function that raises a better error than the one that a forward raised, if it knows one.
        self.explain: Callable[[Exception], None] | None
        # Before the engine's own error, which names another cause.
        call_before_backward(engine, lambda: on_gradient(engine.module))
        self.forward_attributes()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward, through the engine unless all parameters are frozen."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return self.module(*inputs, **kwargs)
        try:
            output = self.engine(*inputs, **kwargs)
        except (RuntimeError, AttributeError, AssertionError) as error:
            if self.explain is not None:
                self.explain(error)
            raise
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._notice)
        return output

    def _notice(self, _: Tensor) -> None:
        self._on_gradient(self.module)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(uncopyable(self.module))


def uncopyable(model: nn.Module) -> str:
    """Return the error message for copying a model that an engine trains."""
    return (
        f"a copy of {type(model).__name__} would hold the hooks of its DeepSpeed engine, and in stage 3 no weights: "
        "build the model anew, and load accelerator.get_state_dict(model) into it"
    )


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, sequences and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in cast("Mapping[Any, Any]", output).values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in cast("list[Any]", output):
            yield from tensors_in(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))
