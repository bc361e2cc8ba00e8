"""A stack of blocks that computes on sequences of which each rank holds a part (context parallelism).

The model around the blocks sees whole sequences: tokens, positions and masks before, hidden states, loss and labels
after. The first block takes this rank's part, and the last one joins the parts. Inside, attention is divided, and all
else treats each position alone, as a perceptron does. This is compared once with what a block computes undivided.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain_parallel.attention import METHODS, AttentionMethod, DividedAttention
from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.found_styles import make_of
from drivetrain_parallel.ranks import TensorRanks, gather
from drivetrain_parallel.regions import drops
from drivetrain_parallel.sequence import SequenceCut
from drivetrain_parallel.streams import RankStream

_MARK = "_divides_sequences"
_NEEDED = (
    "attention must go through torch's scaled_dot_product_attention (in transformers: attn_implementation='sdpa'), "
    "and all else must treat each position alone and be given positions from outside of the blocks; or leave "
    "parallel.context out"
)
_SAMPLE = 32  # positions a rank, of which a block is compared
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest value; 5e-2 for narrower dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """The division of a model's sequences among the ranks of a context axis.

    Attributes:
        size: The number of ranks.
        blocks: The names of the blocks that compute on a part of each sequence, in order.
        compared: The blocks that are compared with what they compute undivided: one of each make.
        method: The way in which attention is divided; None for the one that the number of heads allows.
        is_random: Whether blocks draw random numbers when they train.
    """

    size: int
    blocks: tuple[str, ...]
    compared: frozenset[str]
    method: AttentionMethod | None = None
    is_random: bool = False


def plan_sequences(model: nn.Module, size: int, method: str | None = None) -> SequencePlan:
    """Plan the division of a model's sequences among `size` ranks. Pure: nothing is changed or sent.

    The blocks are the modules of one class in the `nn.ModuleList` or `nn.Sequential` that holds the most parameters.

    Args:
        model: The model, on any device, meta included.
        size: The number of ranks of the context axis.
        method: The way in which attention is divided: "heads" or "gathered"; see `drivetrain_parallel.attention`.

    Raises:
        ParallelPlanError: The model has no such blocks, attends to two sequences, or the method is unknown.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))))
        >>> plan_sequences(model, 2).blocks
        ('1.0', '1.1')
    """
    if method not in (None, *METHODS):
        raise ParallelPlanError(f"method {method!r} is none of {', '.join(METHODS)}")
    stacks = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({type(block) for block in module}) == 1
    }
    if not any(stacks.values()):
        raise ParallelPlanError(
            f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of blocks of one class, between which "
            "sequences could stay divided: leave parallel.context out"
        )
    # One block may be a model in a container: a stack of several inside is preferred.
    chosen = max(stacks, key=lambda name: (len(model.get_submodule(name)) > 1, stacks[name]))  # type: ignore[arg-type]
    blocks = dict(model.get_submodule(chosen).named_children())
    _refuse_two_sequences(model, chosen, stacks)
    makes: dict[object, str] = {}
    for name, block in blocks.items():
        makes.setdefault(make_of(block), name)
    prefix = f"{chosen}." if chosen else ""
    return SequencePlan(
        size=size,
        blocks=tuple(prefix + name for name in blocks),
        compared=frozenset(prefix + name for name in makes.values()),
        method=method,  # type: ignore[arg-type]
        is_random=any(map(drops, blocks.values())),
    )


def _refuse_two_sequences(model: nn.Module, chosen: str, stacks: Mapping[str, int]) -> None:
    """Refuse blocks that also attend to what another stack computes, as the decoder of a translator does."""
    block = next(model.get_submodule(chosen).children())
    takes = [name for name in signature(block.forward).parameters if name.startswith("encoder")]
    others = [
        name for name, size in stacks.items() if not name.startswith(chosen) and 5 * size > stacks[chosen]
    ]
    if takes and others:
        raise ParallelPlanError(
            f"{type(model).__name__} has blocks in {chosen} that attend to what {others[0]} computes "
            f"({takes[0]}), and only one sequence can be divided: leave parallel.context out"
        )


def divide_sequences(
    model: nn.Module, plan: SequencePlan, ranks: TensorRanks, *, device: torch.device | None = None
) -> None:
    """Have a model's blocks compute on this rank's part of each sequence. Called on all ranks of the context axis.

    Nothing is sent. Forward and backward of the model are then called on all of these ranks together, on the same
    whole input, and return the same whole output. The gradient of a loss that all of them compute is the *mean* over
    these ranks of what is in `.grad`, as under data parallelism.

    Args:
        model: The model, with the same values on all ranks.
        plan: The plan, made for this model and number of ranks.
        ranks: The ranks that divide its sequences.
        device: The device that the model will run on; by default that of its first parameter.

    Raises:
        ParallelPlanError: The plan is for another number of ranks, or the model's sequences are divided already.
    """
    if plan.size != ranks.size:
        raise ParallelPlanError(
            f"a plan for {plan.size} ranks with {ranks.size} ranks: plan for {ranks.size}"
        )
    if has_divided_sequences(model):
        raise ParallelPlanError(f"the sequences of {type(model).__name__} are divided already")
    on = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    stack = BlockStack(plan, ranks, RankStream(ranks.rank, on, is_used=plan.is_random))
    for name in plan.blocks:
        block = model.get_submodule(name)
        kind = type(block)

        def forward(self: nn.Module, *args: Any, _name: str = name, _kind: Any = kind, **kwargs: Any) -> Any:
            return stack.run(_name, self, partial(_kind.forward, self), args, kwargs)

        members = {"forward": forward, _MARK: True, "__module__": kind.__module__}
        block.__class__ = type(kind.__name__, (kind,), members)
    model.register_forward_pre_hook(stack.begin)
    model.register_forward_hook(stack.end, always_call=True)


def has_divided_sequences(model: nn.Module) -> bool:
    """Return whether ranks divide the sequences of a model."""
    return any(hasattr(type(module), _MARK) for module in model.modules())


class BlockStack:
    """The blocks of a model that compute on this rank's part of each sequence."""

    def __init__(self, plan: SequencePlan, ranks: TensorRanks, stream: RankStream) -> None:
        self._plan, self._ranks, self._stream = plan, ranks, stream
        self._is_running = False
        self._cut: SequenceCut | None = None  # of the sequences that the model is running on
        # The numbers of positions of whole sequences, by those of a rank's part: for blocks that backward runs again.
        self._lengths: defaultdict[int, set[int]] = defaultdict(set)
        self._to_compare = set(plan.compared)
        self._sample = torch.empty(0)  # hidden states on which blocks are compared

    def begin(self, *_: object) -> None:
        """Begin a forward of the model."""
        self._stream.forget()  # a first block that was run again by backward has left it open
        self._is_running, self._cut = True, None

    def end(self, *_: object) -> None:
        """End a forward, also one that failed between the blocks."""
        self._stream.close()
        self._is_running, self._cut = False, None

    def run(
        self,
        name: str,
        block: nn.Module,
        whole: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a block on this rank's part, the first on what it takes of the whole; the last one joins the parts.

        Args:
            name: The name of the block.
            block: The module of that name.
            whole: The undivided forward.
            args: The arguments of the call; the first tensor is hidden states of shape (batch, positions, width).
            kwargs: The keyword arguments, such as masks and positions, which are those of the whole sequence.
        """
        call = _Call(args, kwargs)
        is_first = name == self._plan.blocks[0]
        cut = self._first_cut(call.states) if is_first else self._current_cut(call.states)
        if name in self._to_compare:
            self._compare(name, block, whole, call, cut)
        if is_first:
            self._stream.open()
        output = self._run_part(whole, call, cut, takes_part=is_first)
        if not self._is_running:
            self._stream.forget()  # a block that backward runs again has its numbers from the checkpoint
        if name != self._plan.blocks[-1]:
            return output
        self._stream.close()
        # Where all ranks go on alike, the sum of their gradients is `size` times that of a part. So is what a block's
        # parameters get of it, and the mean over the ranks, which hold different parts, is their gradient.
        states = gather(_states_of(output), 1, self._ranks).index_select(1, cut.order)
        return states if isinstance(output, Tensor) else type(output)((states, *output[1:]))

    def _first_cut(self, states: Tensor) -> SequenceCut:
        """Return the division of a whole sequence of hidden states."""
        if states.dim() != 3 or not states.is_floating_point():
            raise ParallelPlanError(
                f"{self._plan.blocks[0]} was given a tensor of shape {tuple(states.shape)} first, where hidden "
                "states of shape (batch, positions, width) were expected: leave parallel.context out"
            )
        cut = SequenceCut(length=states.shape[1], size=self._ranks.size, device=states.device)
        if cut.length < 2 * cut.size:
            raise ParallelPlanError(
                f"a sequence of {cut.length} positions among {cut.size} ranks, which divide those of "
                f"{2 * cut.size} or more: a token after a cache of earlier ones cannot be divided; generate from an "
                "export of the model, or leave parallel.context out"
            )
        self._lengths[cut.own_length].add(cut.length)
        if self._is_running:
            self._cut = cut
        return cut

    def _current_cut(self, states: Tensor) -> SequenceCut:
        """Return the division of the sequences of which a block is given this rank's part."""
        own = states.shape[1]
        if self._cut is not None and self._cut.own_length == own:
            return self._cut
        lengths = self._lengths[own]
        if len(lengths) != 1:
            multiple = 2 * self._ranks.size
            raise ParallelPlanError(
                f"backward runs a block again on {own} positions of a rank, which are part of sequences of "
                f"{sorted(lengths)} positions: pad sequences to a multiple of {multiple}, or leave activation "
                "checkpointing out"
            )
        return SequenceCut(length=next(iter(lengths)), size=self._ranks.size, device=states.device)

    def _run_part(
        self, whole: Callable[..., Any], call: "_Call", cut: SequenceCut, *, takes_part: bool
    ) -> Any:
        positions = cut.positions(self._ranks.rank)

        def part(tensor: Tensor) -> Tensor:
            dim = (1 if takes_part else None) if tensor is call.states else sequence_dim(tensor, cut.length)
            return tensor if dim is None else tensor.index_select(dim, positions)

        args, kwargs = call.changed(part)
        with DividedAttention(cut, self._ranks, self._plan.method):
            return whole(*args, **kwargs)

    @torch.no_grad()
    def _compare(
        self, name: str, block: nn.Module, whole: Callable[..., Any], call: "_Call", cut: SequenceCut
    ) -> None:
        """Refuse a block that computes other values on divided sequences: on the first positions of its arguments."""
        if name == self._plan.blocks[0]:
            self._sample = call.states[:, : _SAMPLE * cut.size].detach()
        first = SequenceCut(length=self._sample.shape[1], size=cut.size, device=cut.device)

        def shorten(tensor: Tensor) -> Tensor:
            return self._sample if tensor is call.states else _shortened(tensor, cut.length, first.length)

        with _DetachedCopies():
            args, kwargs = call.changed(shorten, deepcopy)
            own = _Call(args, kwargs).changed(lambda tensor: tensor, deepcopy)
        modes = [(module, module.training) for module in block.modules()]
        try:
            block.eval()
            expected = _states_of(whole(*args, **kwargs)).index_select(1, first.positions(self._ranks.rank))
            found = _states_of(self._run_part(whole, _Call(*own), first, takes_part=True))
        except ParallelPlanError:
            raise
        except Exception as error:
            raise ParallelPlanError(f"{name} does not run on divided sequences: {_NEEDED}") from error
        finally:
            for module, mode in modes:
                module.training = mode
        largest = _TOLERANCE.get(expected.dtype, 5e-2) * expected.abs().max().item()
        differs = torch.zeros((), device=cut.device)
        if found.shape != expected.shape or not torch.allclose(found, expected, 0.0, largest, equal_nan=True):
            differs += 1
        self._ranks.add_up(differs)
        if differs.item():
            raise ParallelPlanError(f"{name} computes other values on divided sequences: {_NEEDED}")
        self._to_compare.discard(name)


class _DetachedCopies(TorchFunctionMode):
    """A context in which tensors that autograd follows can be copied, such as those of a cache of keys and values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy a tensor's values alone; call any other function as it is."""
        del types
        return args[0].detach().clone() if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a block's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def states(self) -> Tensor:
        """The hidden states: the first tensor."""
        found = next(
            (value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)), None
        )
        return torch.empty(0) if found is None else found

    def changed(
        self, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with each tensor changed, also in lists and dicts; `other` changes other values."""

        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if type(value) in (tuple, list):
                return type(value)(map(changed, value))
            return {key: changed(one) for key, one in value.items()} if type(value) is dict else other(value)

        return changed(self.args), changed(self.kwargs)


def sequence_dim(tensor: Tensor, length: int) -> int | None:
    """Return the dimension of an argument that each rank takes its part of; None for one that stays whole.

    Positions are along dimension 1, or 0 without a batch, or the last but one of four, as in tables of rotary
    embeddings. A mask stays whole: it is boolean, or of shape (length, length) or (..., ..., ..., length).
    """
    shape = tensor.shape
    if tensor.dtype == torch.bool or (tensor.is_floating_point() and shape == (length, length)):
        return None
    if len(shape) == 4:
        candidates = () if shape[-1] == length else (1, 2)
    else:
        candidates = (1, 0) if len(shape) > 1 else range(len(shape))
    return next((dim for dim in candidates if shape[dim] == length), None)


def _shortened(tensor: Tensor, length: int, shorter: int) -> Tensor:
    """Return the first positions of an argument of a whole sequence."""
    dim = sequence_dim(tensor, length)
    dims = [at for at in (-1, -2)[: tensor.dim()] if tensor.shape[at] == length] if dim is None else [dim]
    for at in dims:
        tensor = tensor.narrow(at, 0, shorter)
    return tensor


def _states_of(output: Any) -> Tensor:
    """Return the hidden states that a block returns: its output, or the first of them."""
    return output if isinstance(output, Tensor) else output[0]
