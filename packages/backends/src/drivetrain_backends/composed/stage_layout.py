"""The layout of a model whose stages are on several ranks, over the layout of what each rank holds."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_backends.composed.stages import KeepStages, StagedModel
from drivetrain_backends.composed.state_layout import StateLayout
from drivetrain_backends.errors import OptimizerStateError
from drivetrain_backends.modules.compile import plain_state, unwrap_compiled
from drivetrain_backends.state_dict.dtensor import local, sharded_like, whole_of
from drivetrain_state import gather_object
from drivetrain_state.rank_group import RankGroup
from drivetrain_weights import Box, box_of_dtensor
from drivetrain_weights.tensor_box import is_dtensor, whole


class StagePart:
    """A tensor of a state that the ranks of some stages hold.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype of the elements.
        value: The tensor, or this rank's part of it; None for a tensor of another stage.
    """

    def __init__(
        self,
        value: Any,
        sizes: tuple[torch.Size, torch.dtype],
        holder: int,
        ranks: RankGroup,
        device: torch.device,
    ) -> None:
        self.shape, self.dtype = sizes
        self.value = value
        self._holder, self._ranks, self._device = holder, ranks, device

    def held_boxes(self) -> list[tuple[Box, Tensor]]:
        """Return the boxes that this rank holds of the whole tensor, each with its elements, which are not copied."""
        if self.value is None:
            return []
        if hasattr(self.value, "held_boxes"):
            return self.value.held_boxes()
        if is_dtensor(self.value):
            return [(box_of_dtensor(self.value), self.value.to_local())]
        return [(whole(self.shape), self.value)]

    def full_tensor(self) -> Tensor:
        """Return the whole tensor. Called on all ranks."""
        found = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        if self.value is not None:
            own = self.value
            full = whole_of(own, self._device) if isinstance(own, Tensor) else own.full_tensor()
            found = full.detach().to(self._device, copy=True).contiguous()
        # As bytes: gloo supports neither booleans nor fp8.
        dist.broadcast(
            found.view(-1).view(torch.uint8), self._ranks.ranks[self._holder], group=self._ranks.process_group
        )
        return found


class StageLayout(StateLayout):
    """The layout of models of which each rank holds the layers of its stages.

    Args:
        inner: The layout of what each rank holds.
        stages: The transform that divides the models.
    """

    def __init__(self, inner: StateLayout, stages: KeepStages) -> None:
        super().__init__(inner.context)
        self._inner, self._stages = inner, stages
        self._ranks = inner.context.ranks("pipeline")
        self._places: WeakIdKeyDictionary = (
            WeakIdKeyDictionary()
        )  # of parameters in the user's groups, by optimizer

    def adopt(self, optimizer: Optimizer) -> None:
        """Have an optimizer hold the parameters of this rank's stages alone."""
        gone = self._stages.gone
        places: list[list[int]] = []
        for group in optimizer.param_groups:
            kept = [(at, p) for at, p in enumerate(group["params"]) if p not in gone]
            for parameter in group["params"]:
                if parameter in gone:
                    optimizer.state.pop(parameter, None)
            group["params"] = [parameter for _, parameter in kept]
            places.append([at for at, _ in kept])
        self._places[optimizer] = places
        self._inner.adopt(optimizer)

    def open(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] | None = None) -> None:
        """Have modules hold their own parts; see `StateLayout.open`."""
        self._inner.open(models, optimizers)

    @contextmanager
    def gathered(self, model: nn.Module, *, write: bool) -> Generator[None]:
        """Refuse to gather: no rank may be able to hold all stages."""
        del write
        raise RuntimeError(
            f"{type(model).__name__}: the parameters of other stages are not gathered into the model; read "
            "state_dict() tensor by tensor, or call save_model()"
        )
        yield

    def parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the parameters of this rank by name; see `StateLayout.parameters`."""
        return self._inner.parameters(model)

    def chosen(self, model: nn.Module, parameters: Iterable[Tensor] | None) -> list[Tensor]:
        """Return the parameters to clip: of those that were given, what this rank holds."""
        given = None if parameters is None else list(parameters)
        return [] if given == [] else self._inner.chosen(model, given)

    def norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of all stages' gradients; what several stages hold counts once. Called on all ranks."""
        again = {
            parameter
            for model, staged in self._stages.models.items()
            for name, parameter in self.parameters(model).items()
            if staged.holders[name][0] != self._ranks.index
        }
        is_max = norm_type == torch.inf
        power, op = (1.0, dist.ReduceOp.MAX) if is_max else (norm_type, dist.ReduceOp.SUM)
        own = self._inner.norm([one for one in parameters if one not in again], norm_type)
        total = own.to(self.context.device) ** power
        dist.all_reduce(total, op, group=self._ranks.process_group)
        return total ** (1 / power)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict of all stages; each tensor is a `StagePart`."""
        own, staged = self._inner.model_state(model), self._staged(model)
        known: dict[str, Any] = {}
        for described in gather_object(self.context, _described(own), over="pipeline"):
            known = {**described, **known}
        holders = staged.holders
        return {name: self._part(own.get(name), known[name], holders[name][0]) for name in staged.names}

    def optimizer_state(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return the state of the parameters of all stages; tensors are `StagePart`."""
        named = self._inner.optimizer_state(optimizer, names)
        if extra := sorted(named.keys() - {"state", "param_groups"}):
            raise OptimizerStateError(
                f"{type(optimizer).__name__} keeps state beside that of its parameters ({', '.join(extra)}), which "
                "the stages of a pipeline cannot share: train with another optimizer, or without parallel.pipeline"
            )
        own: dict[str, dict[str, Any]] = {name: _described(kept) for name, kept in named["state"].items()}
        groups = [
            list(zip(places, group["params"], strict=True))
            for places, group in zip(self._places[optimizer], named["param_groups"], strict=True)
        ]
        everywhere = gather_object(self.context, (own, groups), over="pipeline")
        state: dict[str, dict[str, Any]] = {}
        for rank, (described, _) in enumerate(everywhere):
            for name, kept in described.items():
                if name not in state:
                    mine = named["state"].get(name, {})
                    state[name] = {key: self._part(mine.get(key), one, rank) for key, one in kept.items()}
        of_groups = zip(*(groups for _, groups in everywhere), strict=True)
        listed = [
            list(dict(sorted(place for part in parts for place in part)).values()) for parts in of_groups
        ]
        param_groups = [
            {**group, "params": params} for group, params in zip(named["param_groups"], listed, strict=True)
        ]
        order = [name for params in listed for name in params if name in state]
        return {"state": {name: state[name] for name in order}, "param_groups": param_groups}

    def divide(self, saved: Mapping[str, Any], names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        """Return what a saved state says of this rank's parameters, in the inner layout."""
        own = {name: parameter for parameter, name in names.items()}
        state = {
            name: {key: _own_value(value, own[name]) for key, value in kept.items()}
            for name, kept in saved["state"].items()
            if name in own
        }
        groups = [
            {**group, "params": [name for name in group["params"] if name in own]}
            for group in saved["param_groups"]
        ]
        return self._inner.divide({**saved, "state": state, "param_groups": groups}, names)

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load this rank's stages of a saved state."""
        staged, own = self._staged(model), plain_state(model, keep_vars=True)
        elsewhere = set(staged.names) - own.keys()
        if missing := sorted(elsewhere - state.keys()):
            raise ValueError(
                f"the checkpoint is not of this {type(model).__name__}: missing {missing[:5]}; build the model it "
                "was saved from"
            )
        self._inner.load_model(
            model,
            {
                name: _own_value(value, own.get(name))
                for name, value in state.items()
                if name not in elsewhere
            },
        )

    def _staged(self, model: nn.Module) -> StagedModel:
        found: StagedModel = self._stages.models[unwrap_compiled(model)]
        return found

    def _part(self, own: Any, described: Any, holder: int) -> Any:
        """Return the part of a tensor that this rank holds, if any; any other value as it is."""
        if not isinstance(described, _Sizes):
            return described if own is None else own
        return StagePart(own, described, holder, self._ranks, self.context.device)


class _Sizes(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as other ranks need to know them: the shape and dtype of a tensor, any other as it is."""
    found = dict(state)
    for name, value in state.items():
        if hasattr(value, "shape"):
            is_scalar = not len(value.shape)
            found[name] = value.detach().cpu() if is_scalar else _Sizes(torch.Size(value.shape), value.dtype)
    return found


def _own_value(value: Any, like: Tensor | None) -> Any:
    """Return a saved value of a tensor that this rank holds: what was read, or what the part of a state is made of.

    Args:
        value: The saved value.
        like: The parameter or buffer that the value belongs to, as this rank holds it.
    """
    if isinstance(value, StagePart) and value.value is not None:
        return value.value
    if like is None or isinstance(value, Tensor) or not hasattr(value, "held_boxes"):
        return value
    boxes: list[tuple[Box, Tensor]] = value.held_boxes()
    own = box_of_dtensor(like) if is_dtensor(like) else whole(like.shape)
    if tuple(value.shape) != tuple(like.shape) or [box for box, _ in boxes if box.num_elements] != [
        own
    ] * bool(boxes):
        return value  # of which another layout divides this rank's part further
    shard = boxes[0][1] if boxes else local(like).new_empty(local(like).shape, dtype=value.dtype)
    return sharded_like(shard, like) if is_dtensor(like) else shard
