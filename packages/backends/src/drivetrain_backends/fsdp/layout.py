"""The layout of sharded models: shards named, gathered, measured, saved, loaded and given to optimizers."""

import logging
from collections.abc import Generator, Iterable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_backends.composed.state_layout import StateLayout
from drivetrain_backends.errors import OptimizerStateError, UnshardedParameterError
from drivetrain_backends.fsdp.gradients import global_norm
from drivetrain_backends.fsdp.sharded_run import ShardedRun
from drivetrain_backends.modules.compile import check_plain_state, load_plain_state, plain_state
from drivetrain_backends.modules.packed_weights import packed_entries
from drivetrain_backends.state_dict.block_tensors import (
    Restored,
    as_stored,
    has_parts,
    is_stored,
    values_of_shard,
)
from drivetrain_backends.state_dict.dtensor import (
    broadcast_parts,
    local,
    own_part,
    plain_dtensor,
    whole_of,
    write,
)
from drivetrain_backends.state_dict.optimizer_state import check_divisible
from drivetrain_state import Context, gather_object
from drivetrain_weights.tensor_box import is_dtensor

logger = logging.getLogger(__name__)

# Forms of shards that are no range of whole blocks: with values in floating point, and without.
_CUT, _FIXED = "cut", "fixed"


class ShardedLayout(StateLayout):
    """The layout of models whose parameters are DTensors."""

    def __init__(self, run: ShardedRun) -> None:
        super().__init__(run.context)
        self._models, self._successors, self._assignments = run.models, run.successors, run.assignments
        self._mesh, self._told_mixed = run.sharding.mesh, set[str]()

    def adopt(self, optimizer: Optimizer) -> None:
        """Point an optimizer and its state to the shards of its parameters."""
        repoint(optimizer, self._successors)

    def open(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] | None = None) -> None:
        """Release what forwards gathered; before a save, refuse what was replaced, written or cannot be divided."""
        for retained in (self._models[model] for model in models):
            retained.sharded.reshard()
            if optimizers is not None:
                retained.sharded.check(thoroughly=True)
                retained.writes.check()
        for optimizer in optimizers or ():
            check_divisible(optimizer, where="FSDP", scalars=True)

    @contextmanager
    def gathered(self, model: nn.Module, *, write: bool) -> Generator[None]:
        """Gather full parameters into the modules in the block, in the dtype of the shards; see `StateLayout`.

        The full parameters replace the shards, so no forward may run in the block.
        """
        sharded = self._models[model].sharded
        sharded.reshard()
        sharded.check()
        whole: dict[nn.Parameter, nn.Parameter] = {
            p: nn.Parameter(whole_of(p, self.context.device), requires_grad=p.requires_grad)
            if isinstance(p, DTensor)
            else p
            for p in sharded.parameters.values()
        }
        with self._assignments.paused():
            sharded.assign(whole)
        try:
            yield
            with torch.no_grad():
                for parameter, values in whole.items() if write else ():
                    # The layout around this one has shared those of experts, of which ranks hold different ones.
                    if not isinstance(parameter, DTensor) or parameter.device_mesh == self._mesh:
                        broadcast_parts([values.detach()], self.context)
                    if values is not parameter:
                        local(parameter).copy_(own_part(values, parameter))
        finally:
            with self._assignments.paused():
                sharded.assign({parameter: parameter for parameter in whole})

    def chosen(self, model: nn.Module, parameters: Iterable[Tensor] | None) -> list[Tensor]:
        """Return the shards of `parameters`, even if these were listed before `prepare` or while gathered."""
        models = [retained.sharded for retained in self._models.values()]
        known = frozenset[Tensor]().union(*(sharded.known for sharded in models))
        own = self._models[model].sharded.parameters.values()
        given = own if parameters is None else list(parameters)
        gathered: dict[Tensor, nn.Parameter] = {}
        if not known.issuperset(given):
            gathered = {p: shard for sharded in models for p, shard in sharded.standing_in().items()}
        for sharded in models:
            sharded.reshard()
        found: list[Tensor] = []
        for parameter in given:
            shard = (
                parameter if parameter in known else gathered.get(parameter, self._successors.get(parameter))
            )
            if shard is None:
                raise UnshardedParameterError(
                    f"clip: a parameter of shape {tuple(parameter.shape)} is none of those that prepare() sharded; "
                    "pass the parameters of prepared models"
                )
            found.append(shard)
        return found

    def parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the shards by name."""
        retained = self._models.get(model)
        return {} if retained is None else retained.sharded.parameters

    def norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm over all ranks' shards."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return global_norm(gradients, norm_type, self.context.device)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict, with shards as plain DTensors."""
        state = super().model_state(model)
        return {
            name: plain_dtensor(value) if isinstance(value, DTensor) else value
            for name, value in state.items()
        }

    def optimizer_state(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return the state; a state whose form differs between ranks is converted to plain values."""
        named = super().optimizer_state(optimizer, names)
        num_mixed, kind = unify_forms(optimizer, names, named, self.context), type(optimizer).__name__
        if num_mixed and self.context.topology.is_main and kind not in self._told_mixed:
            self._told_mixed.add(kind)
            logger.warning(
                "%s: %d states are in few bits on some ranks and in floating point on others, by the sizes of "
                "their shards; checkpoints hold their values in floating point",
                kind,
                num_mixed,
            )
        return named

    def divide(self, saved: Mapping[str, Any], names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        """Return the state with each tensor sharded like its parameter."""
        own, device = {name: parameter for parameter, name in names.items()}, self.context.device
        state = {
            name: {key: _shard_like(value, own.get(name), device) for key, value in kept.items()}
            for name, kept in saved["state"].items()
        }
        return {**saved, "state": state}

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Copy saved tensors into the shards, one at a time."""
        module, own = self._models[model].sharded.module, plain_state(model)
        check_plain_state(module, state, is_exact=True)
        for name in packed_entries(module, own):
            del own[name]
        rest: dict[str, Any] = {}
        for name, target in own.items():
            if isinstance(target, Tensor):
                write(target, state[name], self.context.device)
            else:
                rest[name] = state[name]
        if rest:
            load_plain_state(module, rest, strict=False)


def _shard_like(value: Any, like: Tensor | None, device: torch.device) -> Any:
    """Return a value sharded like `like` if their shapes are equal; other values, such as step counts, unchanged."""
    if not isinstance(value, Tensor) or like is None or value.dim() == 0 or value.shape != like.shape:
        return value
    part = torch.empty_like(like, dtype=value.dtype).detach()
    write(part, value.detach(), device)
    return part


def repoint(optimizer: Optimizer, successors: MutableMapping[Tensor, Tensor]) -> None:
    """Replace parameters by their shards, in the groups and in the state of an optimizer.

    A state of a parameter's shape is sharded like the parameter: each rank keeps its part of its own state.
    """
    for group in optimizer.param_groups:
        group["params"] = [successors.get(p, p) for p in group["params"]]
        turn_off_mixed_foreach(group)
    for parameter in [p for p in optimizer.state if p in successors]:
        state: dict[str, Any] = optimizer.state.pop(parameter)
        shard = successors[parameter]
        restored = Restored(optimizer)
        optimizer.state[shard] = {
            key: restored.restore(as_stored(value), shard)
            if has_parts(value)
            else _shard_like(value, shard, shard.device)
            for key, value in state.items()
        }


def turn_off_mixed_foreach(group: dict[str, Any]) -> None:
    """Have an optimizer step a group one by one: torch's foreach functions do not mix sharded with full tensors."""
    kinds = {isinstance(p, DTensor) for p in group["params"]}
    if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = False


def unify_forms(
    optimizer: Optimizer, names: Mapping[Tensor, str], named: dict[str, Any], context: Context
) -> int:
    """Convert the states in `named` whose form differs between ranks to plain values; return how many these are.

    Called on all ranks. A state that can neither be divided nor converted to floating point is refused.
    """
    if type(optimizer).__module__.startswith("torch.optim"):  # one form, and no message for the others
        return 0
    live = {
        (names[parameter], key): value
        for parameter, kept in optimizer.state.items()
        if parameter in names
        for key, value in kept.items()
        if is_dtensor(value)
    }
    forms = {
        (name, key): _form(local(value), named["state"][name][key])
        for (name, key), value in live.items()
        if local(value).numel()
    }
    found: dict[tuple[str, str], set[str]] = {}
    for own in gather_object(context, forms, over="counts"):
        for key, form in own.items():
            found.setdefault(key, set()).add(form)
    differing = [key for key, kinds in found.items() if len(kinds) > 1 or kinds & {_CUT, _FIXED}]
    _check_values(optimizer, [key for key in differing if _FIXED in found[key]])
    parameters = {name: parameter for parameter, name in names.items()}
    for name, key in differing:
        if (name, key) in live:
            named["state"][name][key] = values_of_shard(live[name, key], parameters[name].dtype)
    return len(differing)


def _form(shard: Tensor, stored: Any) -> str:
    """Return a text that identifies the form in which this rank keeps a state."""
    if not has_parts(shard):
        return "plain"
    if is_stored(stored):
        return type(shard).__qualname__
    return _CUT if hasattr(shard, "dequantize") else _FIXED


def _check_values(optimizer: Optimizer, fixed: Sequence[tuple[str, str]]) -> None:
    if fixed:
        name, key = fixed[0]
        raise OptimizerStateError(
            f"{type(optimizer).__name__}: its state {key} of {name} is made of several tensors that FSDP cannot "
            "divide among ranks, and does not dequantize(): a checkpoint could not be resumed. Use the single or ddp "
            "backend, which keep it whole"
        )
