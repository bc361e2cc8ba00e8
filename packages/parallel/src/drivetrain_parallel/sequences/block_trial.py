"""A block is tried at its first run on divided sequences: with random weights, as it trains, gradients included."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain_parallel.compat import shared_attributes
from drivetrain_parallel.layers.divided_layers import holds_experts, with_forward
from drivetrain_parallel.planning.trial import (
    NOISE,
    TOLERANCE,
    are_near,
    is_plain,
    with_random_values,
)
from drivetrain_parallel.sequences.block_calls import (
    BlockCall,
    SequenceDivision,
    run_on_part,
    shortened,
    states_of,
    with_states,
)
from drivetrain_parallel.sequences.positions import SequenceCut
from drivetrain_parallel.streams import kept_generator

_OF_NARROW_DTYPES = 5e-2  # of the largest value: layers may round to float8 even in fp32
_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockTrial:
    """A block without values, as it computes on whole sequences and on parts.

    Taken before a strategy shards the block, and filled with random values for the trial: the model's own may hide
    what is wrong, such as projections that begin at zero.
    """

    whole: nn.Module
    part: nn.Module

    def passes(
        self, block: nn.Module, call: BlockCall, length: int, first: SequenceCut, division: SequenceDivision
    ) -> bool:
        """Return whether outputs and gradients are those of whole sequences, on this rank. Called on all ranks.

        Args:
            block: The block, whose buffers are read.
            call: The arguments of the block; the trial is given their first positions, and other hidden states.
            length: The number of positions of the whole sequences.
            first: The division of the first positions.
            division: The way in which the block computes on parts.
        """
        states = call.states
        is_narrow = states.dtype.itemsize < 4 or torch.is_autocast_enabled(states.device.type)
        tolerance = _OF_NARROW_DTYPES if is_narrow else TOLERANCE
        # No mode, hook or context of the forward that asks holds in another thread, such as those of a checkpoint.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._compare, block, call, length, first, division, tolerance).result()

    def _compare(
        self,
        block: nn.Module,
        call: BlockCall,
        length: int,
        first: SequenceCut,
        division: SequenceDivision,
        tolerance: float,
    ) -> bool:
        states, device = call.states, call.states.device
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
            torch.accelerator.synchronize()
        dtype = torch.float64 if states.dtype is torch.float64 else torch.float32
        shape = len(states), first.length, states.shape[2]
        rows, generator = first.rows(len(states)), torch.Generator().manual_seed(0)
        given, weights = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))

        def own(tensor: Tensor) -> Tensor:
            if tensor is states:
                return given.clone().requires_grad_()
            tensor = shortened(tensor, length, first.length).detach().clone()  # also one of inference mode
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        def outcome(module: nn.Module, run: Callable[..., Any]) -> list[Tensor]:
            buffers = zip(module.buffers(), block.buffers(), strict=True)
            filled = with_random_values(module, {own: live.detach().clone() for own, live in buffers})
            filled = filled.to(device).train(is_training)
            filled = filled.double() if dtype is torch.float64 else filled
            with _DetachedCopies():
                own_call = BlockCall(*call.changed(own, deepcopy))
            with _WithoutDropout():
                output = states_of(run(filled, own_call))
                return _with_gradients(output, weights, own_call.states, filled)

        def on_whole(module: nn.Module, one: BlockCall) -> Any:
            return module.forward(*one.args, **one.kwargs)

        def own_part(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return run_on_part(partial(forward, module), BlockCall(args, kwargs), first, rows, division)

        def on_parts(module: nn.Module, one: BlockCall) -> Any:
            with_forward(module, own_part)  # which a block that checkpoints itself runs again too
            return with_states(
                on_whole(module, one), lambda own: division.layout(own, rows).join(own.flatten(0, 1))
            )

        with kept_generator(device) as has_drawn:
            is_training = True
            expected = outcome(self.whole, on_whole)
            if has_drawn():
                is_training = False
                expected = outcome(self.whole, on_whole)
            output, *gradients = outcome(self.part, on_parts)
        found = [output, *map(division.gradient, gradients)]
        noise = NOISE * max(one.abs().max().item() for one in expected[1:] if one.numel())
        return all(are_near(one, other, noise, tolerance) for one, other in zip(found, expected, strict=True))


def without_values(block: nn.Module) -> nn.Module:
    """Return a copy of a block with its parameters and buffers on the meta device."""
    memo = shared_attributes(block)
    memo |= {
        id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in block.parameters() if is_plain(p)
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in block.buffers()}
    return deepcopy(block, memo)  # which takes them for copies


def _with_gradients(output: Tensor, weights: Tensor, states: Tensor, block: nn.Module) -> list[Tensor]:
    """Return an output, and the gradients of the hidden states and of the parameters, of a weighted sum of it.

    Those of experts, which ranks hold some of, are another sum on each rank.
    """
    own = (p for one in block.modules() if not holds_experts(one) for p in one.parameters(recurse=False))
    of = [states, *dict.fromkeys(p for p in own if p.requires_grad)]
    (output * weights.to(output.dtype)).sum().backward()
    return [output.detach(), *(torch.zeros_like(one) if one.grad is None else one.grad for one in of)]


class _WithoutDropout(TorchFunctionMode):
    """A context in which dropout drops nothing, also of what a block computes only as it trains."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return what dropout is given; call any other function as it is."""
        del types
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
        return func(*args, **kwargs)


class _DetachedCopies(TorchFunctionMode):
    """A context in which tensors that autograd follows can be copied, such as those of a cache of keys and values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy a tensor's values alone; call any other function as it is."""
        del types
        return args[0].detach().clone() if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
