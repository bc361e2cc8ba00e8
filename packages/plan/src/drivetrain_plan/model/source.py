"""The source of a model: it builds the model without memory, as often as it is asked, with inputs for a step."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import CostError
from drivetrain_dispatch.model.meta_init import init_empty_weights
from drivetrain_parallel.compat import shared_attributes
from drivetrain_plan.errors import PlanError
from drivetrain_plan.model.huggingface import build_to_train, loss_of, training_inputs
from drivetrain_plan.model.layers import shortened
from drivetrain_plan.model.training_modes import TrainingMode

Inputs = Callable[[nn.Module, int, int], Mapping[str, Any]]


class ModelSource(Protocol):
    """A model to train.

    Attributes:
        name: The name that tables show.
    """

    name: str

    def build(self, mode: TrainingMode) -> nn.Module:
        """Return a new model on the meta device, ready to train in a mode."""
        ...

    def inputs(self, model: nn.Module, batch_size: int, num_tokens: int) -> Mapping[str, Any]:
        """Return the keyword arguments of a forward over `batch_size` samples, of `num_tokens` tokens each."""
        ...

    def loss_of(self, outputs: Any) -> Tensor:
        """Return the loss of a forward's outputs."""
        ...


class ConfigSource:
    """A model of transformers, by a folder with its config.json; no weights are read."""

    def __init__(self, folder: Path, *, lora_rank: int = 16) -> None:
        self._folder, self._lora_rank = folder, lora_rank
        self.name = (folder.parent if folder.name == "config.json" else folder).resolve().name

    def build(self, mode: TrainingMode) -> nn.Module:
        """Build the model of the folder's configuration; see `ModelSource`."""
        return build_to_train(
            self._folder, dtype=mode.dtype, lora_rank=self._lora_rank if mode.is_lora else None
        )

    def inputs(self, model: nn.Module, batch_size: int, num_tokens: int) -> Mapping[str, Any]:
        """Return tokens or pictures, and labels; see `ModelSource`."""
        return training_inputs(model, batch_size, num_tokens)

    def loss_of(self, outputs: Any) -> Tensor:
        """Return the loss; see `ModelSource`."""
        return loss_of(outputs)


class FactorySource(ConfigSource):
    """A model that a function builds.

    Args:
        name: The name that tables show.
        factory: A function without arguments that returns a model, or a model and a function that returns the
            keyword arguments of its forward for a batch size and a number of tokens.
    """

    def __init__(self, name: str, factory: Callable[[], Any]) -> None:
        self.name, self._factory = name, factory
        self._inputs: Callable[[int, int], Mapping[str, Any]] | None = None

    def build(self, mode: TrainingMode) -> nn.Module:
        """Call the function while parameters are made on meta; see `ModelSource`."""
        if mode.is_lora:
            raise PlanError(
                f"{self.name}: adapters are known for models of a config.json; add them in the factory"
            )
        try:
            with init_empty_weights(include_buffers=True):
                made: Any = self._factory()
        except (TypeError, LookupError, ValueError, AttributeError) as error:
            raise PlanError(f"{self.name}() failed: {type(error).__name__}: {error}") from error
        model, self._inputs = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, nn.Module):
            raise PlanError(f"{self.name} returned a {type(model).__name__}: it must return an nn.Module")
        return model.train() if mode.dtype is None else model.to(mode.dtype).train()

    def inputs(self, model: nn.Module, batch_size: int, num_tokens: int) -> Mapping[str, Any]:
        """Return what the factory's function returns, or tokens or pictures; see `ModelSource`."""
        if self._inputs is not None:
            try:
                return self._inputs(batch_size, num_tokens)
            except Exception as error:
                raise CostError(
                    f"{self.name}: the function of its inputs fails ({type(error).__name__}: {error})"
                ) from error
        return super().inputs(model, batch_size, num_tokens)


class ModuleSource(FactorySource):
    """A model in hand, of which copies without values are made; it is not changed."""

    def __init__(
        self, model: nn.Module, inputs: Callable[[int, int], Mapping[str, Any]] | None = None
    ) -> None:
        super().__init__(type(model).__name__, lambda: (copy_on_meta(model), inputs))

    def build(self, mode: TrainingMode) -> nn.Module:
        """Copy the model without its values, in its own dtypes; see `ModelSource`."""
        return super().build(
            TrainingMode(name=mode.name, about=mode.about, dtype=None, autocast=mode.autocast)
        )


class BuiltSource:
    """The models of a source, built once for each mode, and copied with all or few of their blocks.

    Args:
        source: The source of the model.
        mode: The dtypes of weights and computing.
        fuses_attention: Whether attention is computed as the model has it; otherwise each step of it by itself, where
            the model is one of transformers.
    """

    def __init__(self, source: ModelSource, mode: TrainingMode, *, fuses_attention: bool = True) -> None:
        self.name, self.inputs, self.loss_of = source.name, source.inputs, source.loss_of
        self._whole = source.build(mode)
        if not fuses_attention and hasattr(self._whole, "set_attn_implementation"):
            model: Any = self._whole
            model.set_attn_implementation("eager")

    def build(self, kept: Mapping[tuple[str, int], int] | None = None) -> nn.Module:
        """Return a model on meta with `kept` blocks of each make (see `shortened`), or all of them."""
        with nullcontext() if kept is None else shortened(self._whole, kept):
            return copy_on_meta(self._whole)


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without values; it shares what modules hold beside tensors, such as configurations."""
    known: dict[int, Any] = shared_attributes(model)
    for one in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(one, device="meta")
        known[id(one)] = nn.Parameter(empty, one.requires_grad) if isinstance(one, nn.Parameter) else empty
    return deepcopy(model, known)


def find_source(named: str, *, lora_rank: int = 16) -> ModelSource:
    """Return the source of a model that a command names: a folder, its config.json, or `module:factory`.

    Raises:
        PlanError: There is no such folder or function; the message says what can be named.
    """
    path = Path(named).expanduser()
    if (path / "config.json").is_file() or (path.name == "config.json" and path.is_file()):
        return ConfigSource(path, lora_rank=lora_rank)
    module, separator, attribute = named.partition(":")
    if not separator:
        raise PlanError(
            f"{named}: no folder with a config.json; name one, or a function as module:factory, which returns a model"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: modules of the working directory
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"{named}: {error}; name a function of a module that can be imported here") from error
    return FactorySource(attribute, cast("Callable[[], Any]", factory))
