"""Measure the memory of one training step on tensors without data, operation by operation."""

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_dispatch.errors import CostError
from drivetrain_plan.compat import (
    BUFFERS,
    DATA_DEPENDENT_ERRORS,
    PARAMETERS,
    Args,
    FakeTensor,
    Kwargs,
    TorchDispatchMode,
    Types,
    tree_leaves,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The memory of a training step, in bytes."""

    weights: int
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0  # the bytes that the forward leaves for the backward, with its outputs and the loss
    # The most bytes that forward and backward hold at once beside weights and gradients: activations and
    # temporary results, such as the gradient of the logits.
    computing: int
    stepping: int = 0  # the most bytes of temporary results in the optimizer's step
    # The most bytes that are allocated at once in a step, from the second step on. Less than the sum,
    # since gradients come as activations go.
    peak: int


class StorageTally(TorchDispatchMode):
    """A mode that counts the bytes of all storages from their creation until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.gradient_bytes = 0
        # The most bytes that were allocated at once since `restart`, without gradients.
        self.computing_bytes = 0
        self._seen = WeakIdKeyDictionary()
        self._resized: list[torch.UntypedStorage] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors, each once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self._seen:
                continue
            size_bytes = storage.nbytes()
            self._seen[storage] = held = [size_bytes]
            self.live_bytes += size_bytes
            weakref.finalize(storage, self._forget, held).atexit = False
        for storage in self._resized:
            held = self._seen[storage]
            self.live_bytes += storage.nbytes() - held[0]
            held[0] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.computing_bytes = max(self.computing_bytes, self.live_bytes - self.gradient_bytes)

    def note_gradient(self, parameter: Tensor) -> None:
        """Count a parameter's gradient, just completed by autograd, as a gradient."""
        if parameter.grad is not None:
            self.gradient_bytes += _size_bytes(parameter.grad)

    def restart(self, *, keeps_computing: bool = False) -> None:
        """Begin new peaks at the memory that is allocated now; `keeps_computing` leaves that without gradients."""
        self.peak_bytes = self.live_bytes
        if not keeps_computing:
            self.computing_bytes = self.live_bytes - self.gradient_bytes

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors at their present sizes, which other code changes, as FSDP does."""
        given = list(tensors)
        self.add(given)
        self._resized += {tensor.untyped_storage() for tensor in given}
        self.add(())

    def _forget(self, held: list[int]) -> None:
        self.live_bytes -= held[0]

    def __torch_dispatch__(self, func: Any, types: Types, args: Args = (), kwargs: Kwargs = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def measure_forward(model: nn.Module, inputs: Mapping[str, Any]) -> StepMemory:
    """Measure the memory of a forward without autograd, in the caller's `FakeTensorMode`."""
    tally = StorageTally()
    with explain_errors(model), tally, torch.no_grad():
        tally.add((*model.parameters(), *model.buffers()))
        weights = tally.live_bytes
        model(**inputs)
    return StepMemory(weights=weights, computing=tally.peak_bytes - weights, peak=tally.peak_bytes)


def measure_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    loss_of: Callable[[Any], Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    autocast: torch.dtype | None = None,
) -> StepMemory:
    """Measure the memory of a training step from the second one on, when optimizer states exist.

    Run forward, backward and step once on tensors without data, in the caller's `FakeTensorMode`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise CostError(
            f"{type(model).__name__} has no parameter with requires_grad: nothing would be trained"
        )
    tally = StorageTally()
    with explain_errors(model), tally:
        tally.add((*model.parameters(), *model.buffers()))
        weights = tally.live_bytes
        tally.add(value for value in inputs.values() if isinstance(value, Tensor))
        before = tally.live_bytes
        tally.restart()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(tally.note_gradient)
        with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            outputs = model(**inputs)
            loss = loss_of(outputs)
        activations = tally.live_bytes - before
        loss.backward()
        del outputs, loss
        computing_peak, computing = tally.peak_bytes, tally.computing_bytes - weights
        tally.restart()
        optimizer = make_optimizer(trained)
        optimizer.step()
        leaves = tree_leaves(list(optimizer.state.values()))
        states = sum(_size_bytes(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        held = tally.gradient_bytes + weights + states
        return StepMemory(
            weights=weights,
            gradients=tally.gradient_bytes,
            optimizer_states=states,
            activations=activations,
            computing=computing,
            stepping=max(0, tally.peak_bytes - held),
            peak=max(computing_peak + states, tally.peak_bytes),
        )


@contextmanager
def explain_errors(model: nn.Module) -> Generator[None]:
    """Run the block, and say in its errors whether it needed the values of tensors."""
    try:
        yield
    except RuntimeError as error:
        depends = isinstance(error, DATA_DEPENDENT_ERRORS)
        what = "its forward depends on the values of tensors, which a step without data does not have"
        first = (str(error) or repr(error)).splitlines()[0]
        raise CostError(
            f"{type(model).__name__}: {what if depends else 'a step without data fails'} ({first})"
        ) from error


def _size_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


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
