"""The state of an engine's model and optimizer as full tensors by parameter name, at any stage.

Under ZeRO each rank holds its partition of a parameter's master and optimizer state: a range of elements.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends.compat import as_they_are
from drivetrain_backends.modules.compile import check_plain_state, load_plain_state, plain_state
from drivetrain_backends.state_dict.block_tensors import as_values
from drivetrain_backends.state_dict.full_tensors import full_tensor
from drivetrain_backends.state_dict.optimizer_state import (
    check_groups,
    check_named_state,
    check_unkeyed,
    load_named_state,
    named_state,
    refuse_undivided,
)
from drivetrain_deepspeed import compat


class PartitionedTensor:
    """A parameter's master, or its optimizer state `key`, of which each rank holds a range of elements.

    A parameter without a master gives its own values.
    """

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype, key: str | None = None) -> None:
        self.shape = compat.full_shape(parameter)
        self.dtype = dtype
        self._parameter, self._key = parameter, key

    def full_tensor(self) -> Tensor:
        """Return the full tensor. Called on all ranks, in the same order."""
        from deepspeed import utils, zero

        parameter, key = self._parameter, self._key
        if key is None and not compat.has_master(parameter):
            with zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        with _as_trained(parameter):
            gathered = (
                utils.safe_get_full_fp32_param(parameter)
                if key is None
                else utils.safe_get_full_optimizer_state(parameter, key)
            )
        if gathered is None:
            raise RuntimeError(
                f"{key or 'the master'} of a parameter of shape {tuple(self.shape)}: its engine was ended between "
                "state_dict() and the gathering; call state_dict() again"
            )
        return gathered

    def flat_range(self) -> tuple[int, Tensor]:
        """Return the row-major index of this rank's first element, and this rank's elements, of shape (n,)."""
        parameter, key = self._parameter, self._key
        start, stop = _own_range(parameter)
        if not compat.is_divided(parameter):
            _, part = compat.master_fragment(parameter, key) or (0, torch.empty(0))
        elif not compat.has_master(parameter):
            part = compat.divided_part(parameter)
        else:
            from deepspeed import utils

            with _as_trained(parameter):
                part = (
                    utils.safe_get_local_fp32_param(parameter)
                    if key is None
                    else utils.safe_get_local_optimizer_state(parameter, key)
                )
        return start, part.detach()[: stop - start]


def read_state(engine: Any, names: Mapping[Tensor, str], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an engine's state, without gathering any tensor. Called on all ranks.

    The state is `{"model": {name: tensor}, "optimizers": [named state]}` on every rank. The tensors of a partitioned
    engine are `PartitionedTensor`s, whose full tensors are fp32.
    """
    if not groups:  # not trained
        return {"model": read_model(engine), "optimizers": []}
    if not engine.zero_optimization():
        optimizer = named_state(engine.optimizer, dict(names))
        return {"model": plain_state(engine.module), "optimizers": [optimizer]}
    base = engine.optimizer.optimizer
    check_unkeyed(base, where="ZeRO")
    compat.link_states(engine.optimizer)
    state: dict[str, dict[str, Any]] = {}
    for name, parameter, master in _masters(engine, names, groups):
        if kept := base.state.get(master):
            state[name] = {key: _read_kept(parameter, key, value) for key, value in kept.items()}
    options = [
        {**options, "params": list(group)} for options, group in zip(base.param_groups, groups, strict=True)
    ]
    return {"model": read_model(engine), "optimizers": [{"state": state, "param_groups": options}]}


def forget_keyed_state(engine: Any) -> None:
    """Drop optimizer state that belongs to no parameter: with it, DeepSpeed (0.19) fails when an engine ends."""
    optimizer = getattr(engine.optimizer, "optimizer", None)  # stage 3 has none for an untrained model
    if optimizer is not None and engine.zero_optimization():
        for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
            del optimizer.state[key]


def load_state(
    engine: Any, names: Mapping[Tensor, str], groups: Sequence[Sequence[str]], state: Mapping[str, Any]
) -> None:
    """Load a state into an engine; each rank keeps its partition. Called on all ranks."""
    if not groups:  # not trained
        load_model(engine, state["model"])
        return
    (saved,) = state["optimizers"]
    if not engine.zero_optimization():
        # Groups may have been added.
        groups = [[names[p] for p in group["params"]] for group in engine.optimizer.param_groups]
        check_named_state(engine.optimizer, names, saved)
        load_plain_state(engine.module, state["model"])
        load_named_state(engine.optimizer, dict(names), saved)
        return
    refuse_undivided(saved, where="ZeRO")
    values: dict[str, Any] = as_values(saved["state"])
    base = engine.optimizer.optimizer
    check_groups(groups, saved["param_groups"], base)
    load_model(engine, state["model"])
    masters = list(_masters(engine, names, groups))
    _make_room(base.state, masters, values)
    for index, options in enumerate(saved["param_groups"]):
        base.param_groups[index] |= {key: value for key, value in options.items() if key != "params"}
    compat.link_states(engine.optimizer)
    for name, parameter, master in masters:
        for key, value in base.state.get(master, {}).items():
            if _is_of_elements(key, value):
                _load_kept(parameter, key, values.get(name, {}).get(key))


def spread(parameters: Sequence[nn.Parameter]) -> None:
    """Broadcast rank 0's values of gathered parameters and copy them to the masters. Called on all ranks."""
    for parameter in parameters:
        dist.broadcast(parameter.detach(), src=0)
        _write_whole(parameter, parameter.detach())


def _masters(
    engine: Any, names: Mapping[Tensor, str], groups: Sequence[Sequence[str]]
) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield the name of each trained parameter, the parameter, and this rank's flat master of its group."""
    own = {name: cast("nn.Parameter", parameter) for parameter, name in names.items()}
    for index, group in enumerate(groups):
        for name in group:
            if compat.has_master(own[name]):
                yield name, own[name], compat.master_of(engine.optimizer, index, own[name])


def _make_room(
    state: dict[Tensor, Any], masters: Sequence[tuple[str, nn.Parameter, Tensor]], saved: Mapping[str, Any]
) -> None:
    """Make the optimizer state of each partition have the same keys as its parameters' saved state."""
    earlier = dict(state)
    state.clear()
    for name, _, master in masters:
        if name not in saved:
            continue
        held, kept = earlier.get(master, {}), state[master]
        for key, value in saved[name].items():
            if not _is_of_elements(key, value):
                kept[key] = value.clone() if isinstance(value, Tensor) else value
            elif key not in kept:
                kept[key] = held[key] if key in held else torch.zeros_like(master)


def _is_of_elements(key: str, value: Any) -> bool:
    """Return whether a saved state has a value for each element; False for a single value, such as a step count."""
    return key != "step" and hasattr(value, "shape")


def _read_kept(parameter: nn.Parameter, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.dim():  # a step count: one per partition here, one per parameter elsewhere
        return value.clone()
    return PartitionedTensor(parameter, value.dtype, key)


def _load_kept(parameter: nn.Parameter, key: str, saved: Any) -> None:
    """Load this rank's partition of a parameter's optimizer state; zeros for a key that was not saved."""
    if hasattr(saved, "flat_range"):
        start, elements = saved.flat_range()
        _write_own_part(parameter, start, elements, key)
    else:
        full = torch.zeros(compat.full_shape(parameter)) if saved is None else full_tensor(saved)
        _write_whole(parameter, full, key)


def read_model(engine: Any) -> dict[str, Any]:
    """Return the model's state dict, with masters in place of partitioned or half-precision parameters."""
    parts: dict[Tensor, PartitionedTensor] = {}  # a tied parameter is gathered once, and stays tied
    state: dict[str, Any] = {}
    for name, value in plain_state(engine.module, keep_vars=True).items():
        has_master = compat.has_master(value)
        if isinstance(value, nn.Parameter) and (has_master or compat.is_divided(value)):
            part = PartitionedTensor(value, torch.float32 if has_master else value.dtype)
            state[name] = parts.setdefault(value, part)
        else:
            state[name] = value.detach() if isinstance(value, Tensor) else value
    return state


def load_model(engine: Any, state: Mapping[str, Any]) -> None:
    """Load parameters and their masters."""
    from deepspeed import zero

    module: nn.Module = engine.module
    check_plain_state(module, state, is_exact=True, shape_of=compat.full_shape)
    own = {name: value for name, value in plain_state(module, keep_vars=True).items() if name in state}
    for name, value in own.items():
        if not isinstance(value, nn.Parameter):
            continue
        saved: Any = state[name]
        saved = _whole_of_parts(saved, value) if hasattr(saved, "flat_range") else full_tensor(saved)
        with zero.GatheredParameters([value], modifier_rank=0), torch.no_grad():
            value.copy_(saved)
        _write_whole(value, saved)
    rest = {name: state[name] for name in state if not isinstance(own[name], nn.Parameter)}
    with as_they_are():  # which asks for the names of the empty parameters too
        load_plain_state(module, rest, strict=False)


@contextmanager
def _as_trained(parameter: Any) -> Generator[None]:
    """Make a frozen parameter's master accessible in the block, where stage 3 (0.19) reports that it has none."""
    before = parameter.requires_grad
    parameter.requires_grad_(before or compat.has_master(parameter))
    try:
        yield
    finally:
        parameter.requires_grad_(before)


def _own_range(parameter: Any) -> tuple[int, int]:
    """Return the start and the stop of this rank's range among a parameter's elements."""
    if compat.is_divided(parameter):
        size, number = compat.part_size(parameter), compat.num_elements(parameter)
        start = min(size * dist.get_rank(compat.group_of(parameter)), number)
        return start, min(start + size, number)  # the last parts are padded
    start, part = compat.master_fragment(parameter, None) or (0, torch.empty(0))
    return start, start + part.numel()


def _write_own_part(parameter: Any, start: int, elements: Tensor, key: str | None = None) -> None:
    """Copy this rank's elements into its partition of a parameter's master or optimizer state."""
    own_start, own_stop = _own_range(parameter)
    own_number = own_stop - own_start
    if (start, elements.numel()) != (own_start, own_number) and elements.numel() + own_number:
        raise ValueError(
            f"elements {start} to {start + elements.numel()} of a parameter of shape "
            f"{tuple(compat.full_shape(parameter))}, of which this rank holds {own_start} to {own_stop}: they were "
            "read for another division"
        )
    if not compat.is_divided(parameter):
        if (fragment := compat.master_fragment(parameter, key)) is not None:
            fragment[1].detach().copy_(elements)
        return
    from deepspeed import utils

    # DeepSpeed's own function for full tensors fails if ranks do not divide them evenly.
    padded = torch.zeros(compat.part_size(parameter), device=elements.device)
    padded[: elements.numel()] = elements
    with _as_trained(parameter):
        if key is None:
            utils.safe_set_local_fp32_param(parameter, padded)
        else:
            utils.safe_set_local_optimizer_state(parameter, padded, key)


def _write_whole(parameter: Any, value: Tensor, key: str | None = None) -> None:
    """Copy this rank's part of a full tensor into a parameter's master, or into its optimizer state `key`."""
    if compat.has_master(parameter):
        start, stop = _own_range(parameter)
        _write_own_part(parameter, start, value.flatten()[start:stop].to(parameter.device), key)


def _whole_of_parts(value: Any, parameter: Any) -> Tensor:
    """Return the full fp32 tensor, gathered from all ranks' ranges of elements. Called on all ranks."""
    start, elements = value.flat_range()
    own = torch.zeros(value.shape, device=parameter.device).flatten()
    own[start : start + elements.numel()] = elements
    # As bits, each of which comes from one rank: a sum of floats would lose the sign of a zero.
    dist.all_reduce(own.view(torch.int32), group=compat.group_of(parameter))
    return own.view(value.shape)
