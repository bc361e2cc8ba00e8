"""Read and load the state of an engine's model and optimizer, as full tensors by parameter name at any stage."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends.compat import as_they_are
from drivetrain_backends.deepspeed.compat import full_shape, has_master, link_states, master_of
from drivetrain_backends.deepspeed.partitions import (
    PartitionedTensor,
    as_trained,
    is_partitioned,
    own_part,
    whole_of_parts,
    write_own_part,
    write_whole,
)
from drivetrain_backends.modules.compile import load_plain_state, plain_state
from drivetrain_backends.modules.packed_weights import packed_entries
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


def read_state(engine: Any, names: Mapping[Tensor, str], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an engine's state, without gathering any tensor. Called on all ranks.

    The state is `{"model": {name: tensor}, "optimizers": [named state]}` on every rank. The tensors of a partitioned
    engine are `PartitionedTensor`s, whose full tensors are fp32.
    """
    if not groups:  # not trained
        return {"model": _read_model(engine), "optimizers": []}
    if not engine.zero_optimization():
        optimizer = named_state(engine.optimizer, dict(names))
        return {"model": plain_state(engine.module), "optimizers": [optimizer]}
    own = {name: cast("nn.Parameter", parameter) for parameter, name in names.items()}
    base = engine.optimizer.optimizer
    check_unkeyed(base, where="ZeRO")
    link_states(engine.optimizer)
    state: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        for name in group:
            kept = (
                base.state.get(master_of(engine.optimizer, index, own[name]), {})
                if has_master(own[name])
                else {}
            )
            if kept:
                state[name] = {key: _read_kept(own[name], key, value) for key, value in kept.items()}
    options = [
        {**options, "params": list(group)} for options, group in zip(base.param_groups, groups, strict=True)
    ]
    return {"model": _read_model(engine), "optimizers": [{"state": state, "param_groups": options}]}


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
        _load_model(engine, state["model"])
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
    saved = {**saved, "state": as_values(saved["state"])}
    check_groups(groups, saved["param_groups"], engine.optimizer.optimizer)
    _load_model(engine, state["model"])
    own = {name: cast("nn.Parameter", parameter) for parameter, name in names.items()}
    base = engine.optimizer.optimizer
    _make_room(engine, groups, own, saved["state"])
    for index, options in enumerate(saved["param_groups"]):
        base.param_groups[index] |= {key: value for key, value in options.items() if key != "params"}
    link_states(engine.optimizer)
    for index, group in enumerate(groups):
        for name in group:
            if has_master(own[name]):
                _load_kept(engine, index, own[name], saved["state"].get(name, {}))


def _load_kept(engine: Any, index: int, parameter: nn.Parameter, saved: Mapping[str, Any]) -> None:
    """Load this rank's partition of a parameter's optimizer state, and zeros for keys that were not saved."""
    for key, value in engine.optimizer.optimizer.state.get(
        master_of(engine.optimizer, index, parameter), {}
    ).items():
        if not _is_of_elements(key, value):
            continue
        kept: Any = saved.get(key)
        if hasattr(kept, "flat_range"):
            start, elements = kept.flat_range()
            write_own_part(parameter, start, elements, key)
        else:
            write_whole(
                parameter, torch.zeros(full_shape(parameter)) if kept is None else full_tensor(kept), key
            )


def spread(parameters: Sequence[nn.Parameter]) -> None:
    """Broadcast rank 0's values of gathered parameters and copy them to the masters. Called on all ranks."""
    for parameter in parameters:
        dist.broadcast(parameter.detach(), src=0)
        write_whole(parameter, parameter.detach())


def _make_room(
    engine: Any, groups: Sequence[Sequence[str]], own: Mapping[str, nn.Parameter], saved: Mapping[str, Any]
) -> None:
    """Make the optimizer state of each partition have the same keys as its parameters' saved state."""
    state = engine.optimizer.optimizer.state
    earlier = dict(state)
    state.clear()
    for index, group in enumerate(groups):
        for name in group:
            if not has_master(own[name]) or name not in saved:
                continue
            partition = master_of(engine.optimizer, index, own[name])
            held, kept = earlier.get(partition, {}), state[partition]
            for key, value in saved[name].items():
                if not _is_of_elements(key, value):
                    kept[key] = value.clone() if isinstance(value, Tensor) else value
                elif key not in kept:
                    kept[key] = held[key] if key in held else torch.zeros_like(partition)


def _is_of_elements(key: str, value: Any) -> bool:
    """Return whether a saved state has a value for each element; False for a single value, such as a step count."""
    return key != "step" and hasattr(value, "shape")


def _read_kept(parameter: nn.Parameter, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.dim():  # a step count: one per partition here, one per parameter elsewhere
        return value.clone()
    return PartitionedTensor(
        full_shape(parameter),
        value.dtype,
        partial(_gather_kept, parameter, key),
        partial(own_part, parameter, key),
    )


def _gather_kept(parameter: nn.Parameter, key: str) -> Tensor:
    """Return a parameter's full optimizer state. Called on all ranks."""
    from deepspeed.utils import safe_get_full_optimizer_state

    with as_trained(parameter):
        gathered = safe_get_full_optimizer_state(parameter, key)
    if gathered is None:
        raise RuntimeError(
            f"{key} of a parameter of shape {tuple(full_shape(parameter))}: its engine was ended between "
            "state_dict() and the gathering; call state_dict() again"
        )
    return gathered


def _read_model(engine: Any) -> dict[str, Any]:
    """Return the model's state dict, with masters in place of partitioned or half-precision parameters."""
    parts: dict[Tensor, PartitionedTensor] = {}  # a tied parameter is gathered once, and stays tied
    state: dict[str, Any] = {}
    for name, value in plain_state(engine.module, keep_vars=True).items():
        if isinstance(value, nn.Parameter) and is_partitioned(value):
            dtype = torch.float32 if has_master(value) else value.dtype
            part = PartitionedTensor(
                full_shape(value), dtype, partial(_gather, value), partial(own_part, value)
            )
            state[name] = parts.setdefault(value, part)
        else:
            state[name] = value.detach() if isinstance(value, Tensor) else value
    return state


def _gather(parameter: nn.Parameter) -> Tensor:
    """Return a full copy of a parameter's master, or of the parameter itself if it has no master."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    if has_master(parameter):
        with as_trained(parameter):
            master = safe_get_full_fp32_param(parameter)
        assert master is not None
        return master
    with zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _load_model(engine: Any, state: Mapping[str, Any]) -> None:
    """Load parameters and their masters."""
    from deepspeed import zero

    module: nn.Module = engine.module
    own = plain_state(module, keep_vars=True)
    for name in packed_entries(module, own):
        del own[name]
    if odd := sorted(set(own) ^ set(state)):
        raise ValueError(f"the checkpoint's {type(module).__name__} differs from this one by {odd[:5]}")
    for name, value in own.items():
        if isinstance(value, nn.Parameter) and full_shape(value) != state[name].shape:
            raise ValueError(
                f"the checkpoint's {name} is of shape {tuple(state[name].shape)}, not {tuple(full_shape(value))}"
            )
    for name, value in own.items():
        if not isinstance(value, nn.Parameter):
            continue
        saved: Any = state[name]
        saved = whole_of_parts(saved, value) if hasattr(saved, "flat_range") else full_tensor(saved)
        with zero.GatheredParameters([value], modifier_rank=0), torch.no_grad():
            value.copy_(saved)
        write_whole(value, saved)
    rest = {name: state[name] for name in state if not isinstance(own[name], nn.Parameter)}
    with as_they_are():  # which asks for the names of the empty parameters too
        load_plain_state(module, rest, strict=False)
