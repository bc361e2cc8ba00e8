"""The layout of models whose layers are divided, over the layout of what each rank holds of them."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_backends.composed.state_layout import StateLayout, weights_of
from drivetrain_backends.errors import DriftedReplicasError
from drivetrain_backends.modules.compile import strip_wrapper_prefix
from drivetrain_backends.modules.replicated_weights import check_replicas
from drivetrain_backends.state_dict.dtensor import broadcast_parts
from drivetrain_backends.state_dict.tensor_part import TensorDivision, TensorPart, join_parts, localized
from drivetrain_state.rank_group import RankGroup


class DividedLayout(StateLayout):
    """The layout of divided models. Another layout sees each rank's part as if it were the whole tensor.

    Args:
        inner: The layout of each rank's parts.
        divisions: The division of each model's parameters that are divided, by name.
        by_parameter: The division of each of them, as optimizers hold them before the inner layout has them.
        replaced: Parameters that optimizers may hold, with those that took their place.
    """

    def __init__(
        self,
        inner: StateLayout,
        divisions: WeakIdKeyDictionary,
        by_parameter: WeakIdKeyDictionary,
        replaced: WeakIdKeyDictionary,
    ) -> None:
        super().__init__(inner.context)
        self._inner, self._models, self._replaced = inner, divisions, replaced
        self._by_parameter = by_parameter
        self._rank_groups: dict[RankGroup, None] = {}  # those that divide parameters, in order
        self._known = WeakSet[nn.Module]()  # models whose parameters have their divisions in `by_parameter`

    def adopt(self, optimizer: Optimizer) -> None:
        """Cut the states that an optimizer has already, then have it hold what the inner layout says."""
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(p, p) for p in group["params"]]
        for parameter, state in optimizer.state.items():
            if (division := self._division(parameter)) is None:
                continue
            cut = division.cut
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape[cut.dim : cut.dim + 1] == (cut.num_elements,):
                    state[key] = division.own(value)
        self._inner.adopt(optimizer)

    def open(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] | None = None) -> None:
        """Have modules hold their own parts; before a save, refuse whole parameters that have drifted apart."""
        self._inner.open(models, optimizers)
        if optimizers is not None:
            self.check_whole(models)

    def check_whole(self, models: Sequence[nn.Module]) -> None:
        """Refuse models whose undivided parameters differ among the ranks that divide the others.

        Called on all ranks. What these ranks compute together is right only while they hold the same.
        """
        for model in models:
            divided = {p for p in self.parameters(model).values() if self._division(p) is not None}
            try:
                check_replicas(self.context, [model], over="tensor", without=divided)
            except DriftedReplicasError as error:
                error.add_note(
                    "ranks that divide layers read the same batches, clip by accelerator.clip_grad_norm_, and use "
                    "the weight of a divided layer by calling that layer alone"
                )
                raise

    @contextmanager
    def gathered(self, model: nn.Module, *, write: bool) -> Generator[None]:
        """Have parameters hold the whole tensors in the block, in which no forward may run; see `StateLayout`."""
        divisions = self._divisions_of(model)
        with self._inner.gathered(model, write=write):
            named = {strip_wrapper_prefix(name): p for name, p in nn.Module.named_parameters(model)}
            parts = {p: (divisions[name], p.data) for name, p in named.items() if name in divisions}
            for parameter, (division, part) in parts.items():
                parameter.data = join_parts(part, division)
            try:
                yield
                if write:
                    broadcast_parts(weights_of(model), self.context, over="world")
                    for parameter, (division, part) in parts.items():
                        part.copy_(division.own(parameter.data))
            finally:
                for parameter, (_, part) in parts.items():
                    parameter.data = part

    def parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the parameters by name; see `StateLayout.parameters`."""
        return self._inner.parameters(model)

    def chosen(self, model: nn.Module, parameters: Iterable[Tensor] | None) -> list[Tensor]:
        """Return the parameters to clip; see `StateLayout.chosen`."""
        return self._inner.chosen(model, parameters)

    def norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of all gradients: those of divided parameters are added up over the ranks that divide them.

        The ranks of each view need one all-reduce.
        """
        divisions = [self._division(parameter) for parameter in parameters]
        # All of them, so that every rank reduces, whatever gradients it has.
        held: dict[RankGroup, list[Tensor]] = {ranks: [] for ranks in self._rank_groups}
        rest: list[Tensor] = []
        for parameter, division in zip(parameters, divisions, strict=True):
            (rest if division is None else held[division.ranks]).append(parameter)
        is_max, device = norm_type == torch.inf, self.context.device
        power, op = (1.0, dist.ReduceOp.MAX) if is_max else (norm_type, dist.ReduceOp.SUM)
        total = self._inner.norm(rest, norm_type).to(device) ** power
        for ranks, parts in held.items():
            own = self._inner.norm(parts, norm_type).to(device) ** power
            dist.all_reduce(own, op, group=ranks.process_group)
            total = torch.maximum(total, own) if is_max else total + own
        return total ** (1 / power)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict, with the parts of divided parameters as `TensorPart`."""
        divisions, first = self._divisions_of(model), _first_names(model)
        state = self._inner.model_state(model)
        # A tied parameter is one part, by all of its names: an empty shard has no memory to tell it by.
        parts = {first[name]: TensorPart(state[name], each) for name, each in divisions.items()}
        return {name: parts[first[name]] if name in divisions else value for name, value in state.items()}

    def optimizer_state(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return the state; what has the shape of a divided parameter's part is a `TensorPart`."""
        named = self._inner.optimizer_state(optimizer, names)
        for parameter, name in names.items():
            if (division := self._division(parameter)) is None:
                continue
            for key, value in named["state"].get(name, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                    named["state"][name][key] = TensorPart(value, division)
        return named

    def divide(self, saved: Mapping[str, Any], names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        """Return a saved state with this rank's parts of it, in the inner layout."""
        state = {name: dict(kept) for name, kept in saved["state"].items()}
        for parameter, name in names.items():
            if (division := self._division(parameter)) is None:
                continue
            for key, value in state.get(name, {}).items():
                if hasattr(value, "shape") and len(value.shape):
                    state[name][key] = localized(value, division, parameter)
        return self._inner.divide({**saved, "state": state}, names)

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a saved state."""
        own, first = self.parameters(model), _first_names(model)
        found = dict(state)
        for name, division in self._divisions_of(model).items():
            if name in found:
                found[name] = localized(found[name], division, own[first[name]])
        self._inner.load_model(model, found)

    def _divisions_of(self, model: nn.Module) -> Mapping[str, TensorDivision]:
        """Return the divisions of the parameters that this rank holds; a pipeline's stages hold some."""
        found: Mapping[str, TensorDivision] = self._models.get(model) or {}
        own = _first_names(model) if found else {}
        return {name: division for name, division in found.items() if name in own}

    def _division(self, parameter: Tensor) -> TensorDivision | None:
        """Return the division of a parameter, as optimizers hold it; None if every rank holds the whole."""
        if len(self._known) < len(self._models):
            for model, divisions in self._models.items():
                self._known.add(model)
                for name, one in self.parameters(model).items():
                    if name in divisions:
                        self._by_parameter[one] = divisions[name]
                        self._rank_groups[divisions[name].ranks] = None
        return self._by_parameter.get(parameter)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by each of its names."""
    named = nn.Module.named_parameters(model, remove_duplicate=False)
    every = {strip_wrapper_prefix(name): parameter for name, parameter in named}
    first = {parameter: name for name, parameter in reversed(every.items())}
    return {name: first[parameter] for name, parameter in every.items()}
