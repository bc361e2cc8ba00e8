"""An engine's model and optimizer as whole tensors under the parameters' names, at any stage, and back."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends.deepspeed.partitions import (
    PartitionedTensor,
    as_trained,
    has_master,
    is_partitioned,
    own_part,
    shape_of,
    whole_of_parts,
    write_own_part,
)
from drivetrain_backends.modules.compile import load_plain_state, plain_state
from drivetrain_backends.state_dict.full_state_dict import whole
from drivetrain_backends.state_dict.optimizer_state import (
    check_groups,
    check_named_state,
    check_unkeyed,
    load_named_state,
    named_state,
    refuse_undivided,
)


def read_state(engine: Any, names: Mapping[Tensor, str], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """An engine's state; nothing is gathered yet. Called on all ranks.

    Args:
        engine: The DeepSpeed engine.
        names: Each parameter's name.
        groups: The names of the parameters of each of the optimizer's groups.

    Returns:
        `{"model": {name: tensor}, "optimizers": [named state]}`, the same on every rank. Of a partitioned engine the
        tensors are `PartitionedTensor`s, in fp32 once they are gathered.
    """
    if not groups:  # not trained
        return {"model": _read_model(engine), "optimizers": []}
    if not engine.zero_optimization():
        optimizer = named_state(engine.optimizer, dict(names))
        return {"model": plain_state(engine.module), "optimizers": [optimizer]}
    own = {name: cast("nn.Parameter", parameter) for parameter, name in names.items()}
    base = engine.optimizer.optimizer
    check_unkeyed(base, where="ZeRO")
    _link_parts(engine)
    state: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        for name in group:
            kept = base.state.get(_partition(engine, index, own[name]), {}) if has_master(own[name]) else {}
            if kept:
                state[name] = {key: _read_kept(own[name], key, value) for key, value in kept.items()}
    options = [
        {**options, "params": list(group)} for options, group in zip(base.param_groups, groups, strict=True)
    ]
    return {"model": _read_model(engine), "optimizers": [{"state": state, "param_groups": options}]}


def forget_keyed_state(engine: Any) -> None:
    """Drop optimizer state that belongs to no parameter: DeepSpeed (0.19) fails on it when an engine ends."""
    optimizer = getattr(engine.optimizer, "optimizer", None)  # stage 3 has none where a model is not trained
    if optimizer is not None and engine.zero_optimization():
        for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
            del optimizer.state[key]


def load_state(
    engine: Any, names: Mapping[Tensor, str], groups: Sequence[Sequence[str]], state: Mapping[str, Any]
) -> None:
    """Put a state into an engine, each rank keeping its part. Called on all ranks.

    Args:
        engine: The DeepSpeed engine.
        names: Each parameter's name.
        groups: The names of the parameters of each of the optimizer's groups.
        state: What `read_state` gave, or another backend's state of the same model.

    Raises:
        ValueError: It is of another model or of other parameter groups; nothing was loaded.
    """
    if not groups:  # not trained
        _load_model(engine, state["model"])
        return
    (saved,) = state["optimizers"]
    if not engine.zero_optimization():
        groups = [
            [names[p] for p in group["params"]] for group in engine.optimizer.param_groups
        ]  # some were added
        check_named_state(engine.optimizer, names, saved)
        load_plain_state(engine.module, state["model"])
        load_named_state(engine.optimizer, dict(names), saved)
        return
    refuse_undivided(saved, where="ZeRO")
    check_groups(groups, saved["param_groups"], engine.optimizer.optimizer)
    _load_model(engine, state["model"])
    own = {name: cast("nn.Parameter", parameter) for parameter, name in names.items()}
    base = engine.optimizer.optimizer
    _make_room(engine, groups, own, saved["state"])
    for index, options in enumerate(saved["param_groups"]):
        base.param_groups[index] |= {key: value for key, value in options.items() if key != "params"}
    _link_parts(engine)
    for index, group in enumerate(groups):
        for name in group:
            if has_master(own[name]):
                _load_kept(engine, index, own[name], saved["state"].get(name, {}))


def _load_kept(engine: Any, index: int, parameter: nn.Parameter, saved: Mapping[str, Any]) -> None:
    """Put this rank's part of a parameter's optimizer state in its place, and zeros for what was not saved."""
    for key, value in engine.optimizer.optimizer.state.get(_partition(engine, index, parameter), {}).items():
        if not _is_of_elements(key, value):
            continue
        kept: Any = saved.get(key)
        if hasattr(kept, "flat_range"):
            start, elements = kept.flat_range()
            write_own_part(parameter, start, elements, key)
        else:
            _write_part(parameter, torch.zeros(shape_of(parameter)) if kept is None else whole(kept), key)


def _write_part(parameter: Any, value: Tensor, key: str | None = None) -> None:
    """Put this rank's part of a whole tensor into the master parameter, or into its optimizer state `key`."""
    from deepspeed import utils

    if not has_master(parameter):
        return
    value = value.to(parameter.device, torch.float32)
    if not hasattr(parameter, "ds_id"):  # stages 1 and 2
        if key is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)
        return
    # Stage 3's own writing of a whole tensor fails where ranks do not divide it evenly (0.19).
    group: Any = parameter.ds_process_group
    with as_trained(parameter):
        part = utils.safe_get_local_fp32_param(parameter)
        padded = torch.zeros(
            part.numel() * dist.get_world_size(group), dtype=value.dtype, device=value.device
        )
        padded[: value.numel()] = value.flatten()
        own = padded.narrow(0, part.numel() * dist.get_rank(group), part.numel())
        if key is None:
            utils.safe_set_local_fp32_param(parameter, own)
        else:
            utils.safe_set_local_optimizer_state(parameter, own, key)


def spread(parameters: Sequence[nn.Parameter]) -> None:
    """Bring what rank 0 has in gathered parameters to all ranks, and into their masters. Called on all ranks."""
    for parameter in parameters:
        dist.broadcast(parameter.detach(), src=0)
        _write_part(parameter, parameter.detach())


def _partition(engine: Any, index: int, parameter: Tensor) -> Tensor:
    """The flat master tensor of this rank that a parameter's part lies in, or would."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3: a group is cut into several
        return optimizer.fp32_partitioned_groups_flat[
            optimizer.grad_position[optimizer.get_param_id(parameter)][0]
        ]
    if hasattr(optimizer, "fp32_groups_flat_partition"):  # stage 1 in bf16
        return optimizer.fp32_groups_flat_partition[index]
    return optimizer.single_partition_of_fp32_groups[index]


def _make_room(
    engine: Any, groups: Sequence[Sequence[str]], own: Mapping[str, nn.Parameter], saved: Mapping[str, Any]
) -> None:
    """Give each partition the entries that the saved state of its parameters has, and no others."""
    state = engine.optimizer.optimizer.state
    earlier = dict(state)
    state.clear()
    for index, group in enumerate(groups):
        for name in group:
            if not has_master(own[name]) or name not in saved:
                continue
            partition = _partition(engine, index, own[name])
            held, kept = earlier.get(partition, {}), state[partition]
            for key, value in saved[name].items():
                if not _is_of_elements(key, value):
                    kept[key] = value.clone() if isinstance(value, Tensor) else value
                elif key not in kept:
                    kept[key] = held[key] if key in held else torch.zeros_like(partition)


def _link_parts(engine: Any) -> None:
    """Have stages 1 and 2 find each parameter's part of the optimizer's state.

    DeepSpeed (0.19) looks for the parts once, after the first group's step, when the other groups have no state yet.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        if optimizer.optimizer.state:
            optimizer._lazy_init_hp_params_optimizer_state()


def _is_of_elements(key: str, value: Any) -> bool:
    """Whether a saved state has a value for each element of its parameter, or one for all, as a count of steps."""
    return key != "step" and hasattr(value, "shape")


def _read_kept(parameter: nn.Parameter, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.dim():  # a count of steps: one for the partition here, one for each parameter elsewhere
        return value.clone()
    return PartitionedTensor(
        shape_of(parameter),
        value.dtype,
        partial(_gather_kept, parameter, key),
        partial(own_part, parameter, key),
    )


def _gather_kept(parameter: nn.Parameter, key: str) -> Tensor:
    """An optimizer's state of a parameter. Called on all ranks.

    Raises:
        RuntimeError: The engine was ended since the state was asked for.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    with as_trained(parameter):
        gathered = safe_get_full_optimizer_state(parameter, key)
    if gathered is None:
        raise RuntimeError(
            f"{key} of a parameter of shape {tuple(shape_of(parameter))}: its engine was ended between state_dict() "
            "and the gathering; call state_dict() again"
        )
    return gathered


def _read_model(engine: Any) -> dict[str, Any]:
    """The model's own state dict, with masters in the place of partitioned or halved parameters."""
    parts: dict[Tensor, PartitionedTensor] = {}  # a tied parameter is gathered once, and stays tied
    state: dict[str, Any] = {}
    for name, value in plain_state(engine.module, keep_vars=True).items():
        if isinstance(value, nn.Parameter) and is_partitioned(value):
            dtype = torch.float32 if has_master(value) else value.dtype
            part = PartitionedTensor(
                shape_of(value), dtype, partial(_gather, value), partial(own_part, value)
            )
            state[name] = parts.setdefault(value, part)
        else:
            state[name] = value.detach() if isinstance(value, Tensor) else value
    return state


def _gather(parameter: nn.Parameter) -> Tensor:
    """A parameter as its master has it; one that is not trained as it is."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    if has_master(parameter):
        with as_trained(parameter):
            master = safe_get_full_fp32_param(parameter)
        assert master is not None
        return master
    with zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _whole(value: Any, parameter: nn.Parameter) -> Tensor:
    """A parameter's saved value, gathered where it is in parts. Called on all ranks."""
    return whole_of_parts(value, parameter) if hasattr(value, "flat_range") else whole(value)


def _load_model(engine: Any, state: Mapping[str, Any]) -> None:
    """Load parameters and their masters.

    Raises:
        ValueError: The names or shapes are not the model's.
    """
    from deepspeed import zero

    module: nn.Module = engine.module
    own = plain_state(module, keep_vars=True)
    if odd := sorted(set(own) ^ set(state)):
        raise ValueError(f"the checkpoint's {type(module).__name__} differs from this one by {odd[:5]}")
    for name, value in own.items():
        if isinstance(value, nn.Parameter) and shape_of(value) != state[name].shape:
            raise ValueError(
                f"the checkpoint's {name} is of shape {tuple(state[name].shape)}, not {tuple(shape_of(value))}"
            )
    for name, value in own.items():
        if not isinstance(value, nn.Parameter):
            continue
        saved = _whole(state[name], value)
        with zero.GatheredParameters([value], modifier_rank=0), torch.no_grad():
            value.copy_(saved)
        _write_part(value, saved)
    rest = {name: state[name] for name in state if not isinstance(own[name], nn.Parameter)}
    load_plain_state(module, rest, strict=False)
