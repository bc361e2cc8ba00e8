"""Divided layers: each keeps its module, which holds this rank's part and computes with the other ranks.

A module's class is exchanged for a subclass, so that the module, its names and its hooks stay what they are. A layer
kind says along which dimensions of its weight outputs and inputs lie, and how it multiplies.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from itertools import count
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain_parallel.compat import exchanged_parameters
from drivetrain_parallel.layers.token_exchange import apply_experts, share_tokens
from drivetrain_parallel.outputs.divided_tensor import by_rows, divided
from drivetrain_parallel.outputs.layout import PartLayout
from drivetrain_parallel.plan import LayerPlan, Style
from drivetrain_parallel.ranks import TensorRanks, add_up, enter, join
from drivetrain_parallel.streams import RankStream


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """A kind of layer that can be divided.

    Attributes:
        outputs: The dimension of the weight along which the outputs lie.
        inputs: The dimension along which the inputs lie; None for an embedding.
        multiply: The product of an input and the weight, without the bias.
        sizes: The names of the module's numbers of outputs and of inputs.
    """

    outputs: int
    inputs: int | None
    multiply: Callable[[Tensor, Tensor], Tensor]
    sizes: tuple[str, str]


def _look_up(*_: Tensor) -> Tensor:
    raise AssertionError("an embedding is looked up by its own forward")


_MARK = "divided_as"  # an attribute of the class of a divided layer

_KINDS: Mapping[str, LayerKind] = MappingProxyType(
    {
        "torch.nn.modules.linear.Linear": LayerKind(
            outputs=0, inputs=1, multiply=F.linear, sizes=("out_features", "in_features")
        ),
        # transformers keeps GPT-2's weights as (inputs, outputs).
        "transformers.pytorch_utils.Conv1D": LayerKind(
            outputs=1, inputs=0, multiply=torch.matmul, sizes=("nf", "nx")
        ),
        "torch.nn.modules.sparse.Embedding": LayerKind(
            outputs=0, inputs=None, multiply=_look_up, sizes=("num_embeddings", "embedding_dim")
        ),
    }
)


def kind_of(module: nn.Module) -> LayerKind | None:
    """Return the kind of a layer; None if its class cannot be divided, such as a quantised or a divided one."""
    if is_divided(module) or type(weight := getattr(module, "weight", None)) is not nn.Parameter:
        return None  # a weight of another class holds codes and scales
    if not weight.is_floating_point():
        return None
    return _KINDS.get(f"{type(module).__module__}.{type(module).__qualname__}")


def is_divided(module: nn.Module) -> bool:
    """Return whether a module is a divided layer."""
    return hasattr(type(module), _MARK)


def holds_experts(module: object) -> bool:
    """Return whether a module holds this rank's experts, of those that ranks divide."""
    return getattr(type(module), _MARK, None) == "experts"


class Region:
    """The computation between column layers and the row layer that follows, on this rank's part of the activations.

    Query, key and value layers are given one input, whose gradient is then added up over the ranks once. Experts are
    a region of their own, whose `ranks` are those that are given the same tokens.
    """

    def __init__(self, ranks: TensorRanks, stream: RankStream) -> None:
        self.ranks, self._stream = ranks, stream
        self._given: Tensor | None = None
        self._entered: Tensor | None = None

    def enter(self, tensor: Tensor) -> Tensor:
        """Begin the region, and return the input for a column layer."""
        self._stream.open()
        entered = self._entered
        is_followed = tensor.requires_grad and torch.is_grad_enabled()
        if entered is None or self._given is not tensor or entered.requires_grad != is_followed:
            entered = self._entered = enter(tensor, self.ranks)
            self._given = tensor
        return entered

    def leave(self) -> None:
        """End the region."""
        self._stream.close()
        self._given = self._entered = None

    def begin(self) -> None:
        """Begin a forward of the model: what backward has run again, such as a checkpoint, has put numbers back."""
        self._stream.forget()

    @contextmanager
    def own_numbers(self) -> Generator[None]:
        """Draw this rank's own random numbers in the block."""
        self._stream.open()
        try:
            yield
        finally:
            self._stream.close()


def watch(model: nn.Module, regions: Sequence[Region]) -> None:
    """End regions also where a forward of the model fails inside: no graph is kept, and all ranks draw alike."""

    def begin(*_: object) -> None:
        for region in regions:
            region.begin()

    def end(*_: object) -> None:
        for region in regions:
            region.leave()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


def divide_layer(module: nn.Module, plan: LayerPlan, ranks: TensorRanks, region: Region) -> None:
    """Have a module, whose parameters hold this rank's part by now, compute as a divided layer.

    The layers of one `region` are those between which activations stay divided.
    """
    forward = _FORWARDS[plan.style](plan, ranks, region, kind_of(module))
    with_forward(module, partial(_of_own_rows, forward), **{_MARK: plan.style})
    # The fast path of torch's encoder layer reads the weights of layers that it does not call, unless one has a hook.
    module.register_forward_pre_hook(_is_called)


def _is_called(*_: object) -> None:
    pass


# The forward of a module in place of that of its class: it is given the module, the other, and the arguments.
Forward: TypeAlias = Callable[..., Any]


def _of_own_rows(
    forward: Forward, module: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of a divided layer on own rows, if its only argument is a tensor of which ranks hold rows."""
    if len(args) != 1 or kwargs:
        return forward(module, whole, *args, **kwargs)
    return by_rows(partial(forward, module, whole), *args)


def with_forward(module: nn.Module, forward: Forward, **members: object) -> None:
    """Exchange the class of a module for a subclass with another forward, and with further members."""
    kind = type(module)

    @wraps(kind.forward)  # whose signature callers read, such as `generate` for what it may pass
    def exchanged(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, kind.forward, *args, **kwargs)

    # The class holds what the forward needs, such as ranks, so that a copy of the module computes with the same.
    module.__class__ = type(
        kind.__name__, (kind,), {"forward": exchanged, "__module__": kind.__module__, **members}
    )


def _column(plan: LayerPlan, ranks: TensorRanks, region: Region, layer: LayerKind | None) -> Forward:
    del plan, ranks, layer

    def forward(module: nn.Module, whole: Callable[..., Tensor], tensor: Tensor) -> Tensor:
        return whole(module, region.enter(tensor))

    return forward


def _row(plan: LayerPlan, ranks: TensorRanks, region: Region, layer: LayerKind | None) -> Forward:
    del plan
    assert layer is not None
    multiply = layer.multiply

    def forward(module: Any, whole: Callable[..., Tensor], tensor: Tensor) -> Tensor:
        del whole
        region.leave()
        found = add_up(multiply(tensor, module.weight), ranks)
        return found if module.bias is None else found + module.bias.to(found.dtype)

    return forward


def _gathered_column(plan: LayerPlan, ranks: TensorRanks, region: Region, layer: LayerKind | None) -> Forward:
    del region, layer
    sizes = plan.cuts["weight"].sizes(ranks.size)

    def forward(module: nn.Module, whole: Callable[..., Tensor], tensor: Tensor) -> Tensor:
        return join(whole(module, enter(tensor, ranks)), -1, sizes, ranks)

    return forward


def _vocabulary_column(
    plan: LayerPlan, ranks: TensorRanks, region: Region, layer: LayerKind | None
) -> Forward:
    del region, layer
    sizes, calls = plan.cuts["weight"].sizes(ranks.size), count()

    def forward(module: nn.Module, whole: Callable[..., Tensor], tensor: Tensor) -> Tensor:
        part = whole(module, enter(tensor, ranks))
        # Ranks train alike, whereas one of them may evaluate or show what the model returns.
        if module.training and part.requires_grad and not torch.compiler.is_compiling():
            layout = PartLayout.of_columns(part, sizes, ranks)
            return divided(part, layout, f"{plan.name}, call {next(calls)}")
        return join(part, -1, sizes, ranks)

    return forward


def _vocabulary(plan: LayerPlan, ranks: TensorRanks, region: Region, layer: LayerKind | None) -> Forward:
    del region, layer
    cut = plan.cuts["weight"]
    num_rows, ((first, last),) = cut.num_elements, cut.ranges(ranks.rank, ranks.size)

    def forward(module: Any, whole: Callable[..., Tensor], tokens: Tensor) -> Tensor:
        del whole
        padding = module.padding_idx
        own_padding = None if padding is None or not first <= padding < last else padding - first
        is_own = (first <= tokens) & (tokens < last)
        is_elsewhere = (
            (tokens >= 0) & (tokens < num_rows) & ~is_own
        )  # what no rank has is out of range on all of them
        rows = F.embedding((tokens - first).masked_fill(is_elsewhere, 0), module.weight, own_padding)
        return add_up(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), ranks)

    return forward


def _summed(plan: LayerPlan, ranks: TensorRanks, region: Region, layer: LayerKind | None) -> Forward:
    del plan, region, layer

    def forward(module: Any, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with exchanged_parameters(module, lambda parameter: enter(parameter, ranks)):
            return whole(module, *args, **kwargs)

    return forward


def _experts(plan: LayerPlan, ranks: TensorRanks, region: Region, layer: LayerKind | None) -> Forward:
    del layer
    cut = next(iter(plan.cuts.values()))
    num_losses = ranks.size // region.ranks.size

    def forward(module: Any, whole: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        def apply(tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            found, module.expert_counts = apply_experts(
                partial(whole, module), tokens, index, weights, cut=cut, ranks=ranks, num_losses=num_losses
            )
            return found

        tokens, index, weights = signature(whole).bind(module, *args, **kwargs).args[1:]
        if region.ranks.size == 1:
            return apply(tokens, index, weights)
        with region.own_numbers():
            return share_tokens(apply, tokens, index, weights, ranks=region.ranks)

    return forward


_FORWARDS: Mapping[Style, Callable[[LayerPlan, TensorRanks, Region, LayerKind | None], Forward]] = (
    MappingProxyType(
        {
            "column": _column,
            "row": _row,
            "gathered_column": _gathered_column,
            "vocabulary_column": _vocabulary_column,
            "vocabulary": _vocabulary,
            "summed": _summed,
            "experts": _experts,
        }
    )
)
