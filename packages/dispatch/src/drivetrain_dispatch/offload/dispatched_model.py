"""The engines and hooks of a dispatched model: find them, read their counts and traces, and remove them."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor, nn

from drivetrain_dispatch.errors import DeviceMapError, OffloadedError
from drivetrain_dispatch.offload.engine import OffloadEngine, OffloadTrace
from drivetrain_dispatch.offload.forward_hooks import MethodWrapper, NotCopied, check_removable
from drivetrain_dispatch.offload.mapped_weights import MappedWeightsEngine
from drivetrain_dispatch.offload.residency import OffloadStats
from drivetrain_messages import list_some

_ATTRIBUTE = "_drivetrain_dispatch"  # the name of the model's attribute


class Removable(Protocol):
    """A handle of something that was changed in a model."""

    def remove(self) -> None:
        """Undo the change."""


@dataclass(slots=True, kw_only=True)
class Dispatched(NotCopied):
    """The engines of a dispatched model, and the handles to remove in reverse order."""

    engines: list[OffloadEngine | MappedWeightsEngine] = field(
        default_factory=list[OffloadEngine | MappedWeightsEngine]
    )
    handles: list[Removable] = field(default_factory=list[Removable])


def mark_dispatched(model: nn.Module) -> Dispatched:
    """Make a model a dispatched one, without engines and handles yet."""
    dispatched = Dispatched()
    setattr(model, _ATTRIBUTE, dispatched)
    return dispatched


def is_dispatched(model: nn.Module) -> bool:
    """Return whether a model is dispatched."""
    return _ATTRIBUTE in model.__dict__


def check_not_dispatched(model: nn.Module) -> None:
    """Check that neither a model nor a part of it is dispatched."""
    for name, module in model.named_modules():
        if is_dispatched(module):
            whose = f"{name!r} of the model" if name else "the model"
            raise OffloadedError(
                f"{whose} is dispatched already: call remove_hooks(model) on it before it is dispatched anew"
            )


def check_has_weights(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Check that all tensors of a model, given with their names, have values."""
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise DeviceMapError(
            f"{list_some(map(repr, empty), most=1)} on the meta device: load weights first, with "
            "load_checkpoint_in_model, or with load_checkpoint_and_dispatch at once"
        )


def remove_hooks(model: nn.Module) -> nn.Module:
    """Make a dispatched model an ordinary one again.

    Remove its hooks, and make its weights ordinary tensors with their current values: offloaded weights on the host,
    weights on the disk as mapped pages of their file, the others on their device. A model that is not dispatched is
    unchanged.

    Raises:
        OffloadedError: A forward is running, or the forward, `encode` or `decode` of a module was replaced after the
            dispatch. The model is unchanged.

    Example:
        >>> import torch
        >>> from drivetrain_dispatch import dispatch_model
        >>> model = dispatch_model(torch.nn.Linear(4, 2), {"": "cpu"})
        >>> type(remove_hooks(model))
        <class 'torch.nn.modules.linear.Linear'>
    """
    dispatched: Dispatched | None = model.__dict__.get(_ATTRIBUTE)
    if dispatched is not None:
        if any(engine.is_busy() for engine in dispatched.engines):
            raise OffloadedError(
                "a forward of the model is under way: call remove_hooks(model) when it is over"
            )
        check_removable([handle for handle in dispatched.handles if isinstance(handle, MethodWrapper)])
        for handle in reversed(dispatched.handles):
            handle.remove()
        for engine in dispatched.engines:
            engine.close()
        model.__dict__.pop("hf_device_map", None)  # other libraries may have deleted it
        delattr(model, _ATTRIBUTE)
    return model


def offload_stats(model: nn.Module) -> OffloadStats:
    """Return how many bytes the forwards of a dispatched model have fetched, and how often they stalled.

    Raises:
        OffloadedError: The model is not dispatched.
    """
    engine = _engine_of(model)
    return OffloadStats() if engine is None else replace(engine.stats)


@contextmanager
def trace_offload(model: nn.Module) -> Generator[OffloadTrace]:
    """Run the block with a trace of a dispatched model: when each unit was fetched, waited for and computed.

    Weights that the host uses in place are not fetched, and so not traced.

    Raises:
        OffloadedError: The model is not dispatched.
    """
    trace = OffloadTrace()
    engine = _engine_of(model)
    if engine is not None:
        engine.trace = trace
    try:
        yield trace
    finally:
        if engine is not None:
            engine.trace = None


def _engine_of(model: nn.Module) -> OffloadEngine | None:
    """Return the engine that fetches weights of a dispatched model; None if all stay where they are used."""
    dispatched: Dispatched | None = model.__dict__.get(_ATTRIBUTE)
    if dispatched is None:
        raise OffloadedError("the model is not dispatched: nothing is fetched for it")
    return next((engine for engine in dispatched.engines if isinstance(engine, OffloadEngine)), None)
