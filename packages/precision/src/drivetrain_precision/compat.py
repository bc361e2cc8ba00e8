"""The private names of torch and torchao that this package uses, in one place.

torch has no public API for them. They are the same in torch 2.9 to 2.15; tests/precision/test_compat.py holds each
one to what is relied on, and docs/design/platforms.md lists them.
"""

import sys
from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The arguments of `__torch_function__` and `__torch_dispatch__`, which torch leaves untyped.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any] | None
# The frames of a backward that the engine runs, by the file within torch and the function.
ENGINE_FRAME = ("autograd/graph.py", "_engine_run_backward")
# The attribute under which torch.compile's wrapper holds the module, a part of the names below it.
COMPILED_PREFIX = "_orig_mod."

_bindings: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_profiler, _config = _bindings._autograd, _bindings._profiler


def unscale(gradients: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply gradients of one dtype on one device by `inverse`, in place, in one kernel.

    If a gradient is not finite, 1.0 is written to `found_inf`, an fp32 tensor of shape ().
    """
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse)


# Writes the next scale and the number of steps since it last changed, without reading the device. It takes both as
# tensors of shape () and `found_inf`, which is not 0 if the step overflowed; then the factors of growth and backoff,
# and the interval of growth in steps.
update_scale: Any = torch.ops.aten._amp_update_scale_


def has_bf16_units() -> bool:
    """Return whether this processor has bf16 instructions; False if torch cannot tell, such as on ARM."""
    return getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()


def compiler_is_imported() -> bool:
    """Return whether the compiler was imported. Nothing is compiled before the import, which takes seconds."""
    return "torch._dynamo" in sys.modules


def num_compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has captured in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return 0 if dynamo is None else dynamo.utils.counters["stats"]["unique_graphs"]


def autocast_names(device_type: str) -> list[str]:
    """Return the operations for which torch's autocast has a rule on a device type, such as "aten::softmax.int"."""
    key = f"Autocast{_bindings._dispatch_key_for_device(device_type)}"
    return sorted(set(_bindings._dispatch_get_registrations_for_dispatch_key(key)))


def arguments_of(operation: Any) -> list[tuple[str, str, bool, Any]]:
    """Return each argument of an operation: name, type, whether it is passed by name, and default (or None)."""
    return [
        (one.name, str(one.type), one.kwarg_only, one.default_value if one.has_default_value() else None)
        for one in operation._schema.arguments
    ]


class CastSeenError(Exception):
    """The end of an operation's call on a `_ValuelessTensor`, with the dtypes that it would compute in."""

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes


class _ValuelessTensor(Tensor):
    """A tensor that raises CastSeenError in place of any computation."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        """Raise CastSeenError instead of computing."""
        named = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            raise CastSeenError({named["dtype"]})
        inputs = [one.name for one in func._schema.arguments]
        if any(name == "half_to_float" and value for name, value in zip(inputs, args, strict=False)):
            raise CastSeenError({torch.float32})  # the cast is a part of the operation
        flat = [*args, *named.values()]
        flat += [one for each in flat if isinstance(each, list) for one in each]
        tensors = {one.dtype for one in flat if isinstance(one, Tensor)}
        raise CastSeenError(tensors | {one for one in flat if isinstance(one, torch.dtype)})


def valueless_tensor(dtype: torch.dtype, device_type: str) -> Tensor:
    """Return a tensor on a device that need not exist: any computation with the tensor raises CastSeenError."""
    return torch.Tensor._make_wrapper_subclass(
        _ValuelessTensor, (2, 2), dtype=dtype, device=torch.device(device_type)
    )


def mxfp8_product(
    rows: Tensor, weight: Tensor, *, kernels: Any, scales: Any, plain_weight_gradient: bool
) -> Tensor:
    """Multiply rows (rows, in_features) by a weight (out_features, in_features) in MXFP8, by torchao 0.18.

    Both have the same dtype. Gradients are computed in MXFP8 too; with `plain_weight_gradient`, the weight's in the
    dtype of the weight.
    """
    from torchao.prototype.moe_training.mxfp8_linear import (
        _to_mxfp8_then_scaled_mm,  # pyright: ignore[reportPrivateUsage]
    )

    return _to_mxfp8_then_scaled_mm(
        rows,
        weight,
        kernel_preference=kernels,
        scale_calculation_mode=scales,
        wgrad_with_hp=plain_weight_gradient,
    )


def rounding_seed(layer: nn.Module) -> Tensor:
    """Return the seed of stochastic rounding that torchao 0.18's NVFP4 layer keeps, of shape (1,) in int64."""
    return layer.get_buffer("_sr_seed")


def exchange_weight_scale(weight: Any, scale: Tensor | None) -> Tensor | None:
    """Give a new scale to a weight's shard that torchao 0.18 gathers in float8; return the old scale."""
    # Not by `to_local`, which returns another object than the one that FSDP gathers.
    shard = weight._local_tensor
    before, shard._precomputed_scale = shard._precomputed_scale, scale
    return before


@dataclass(slots=True)
class OperationEvent:
    """An operation in a profile, such as "aten::mm", with its caller and its callees."""

    name: str
    caller: "OperationEvent | None" = None
    called: "list[OperationEvent]" = field(default_factory=lambda: list[OperationEvent]())

    def calls(self, names: Collection[str], prefixes: tuple[str, ...]) -> bool:
        """Return whether it ran, at any depth, an operation with one of the names or with one of the prefixes."""
        return any(
            each.name in names or each.name.startswith(prefixes) or each.calls(names, prefixes)
            for each in self.called
        )

    def is_called_by(self, prefixes: tuple[str, ...]) -> bool:
        """Return whether an operation with one of the prefixes ran this one, at any depth."""
        return self.caller is not None and (
            self.caller.name.startswith(prefixes) or self.caller.is_called_by(prefixes)
        )


@contextmanager
def record_operations() -> Generator[list[OperationEvent] | None]:
    """Record the operations of the block, backward and compiled code included, into a list.

    The list is filled at the end of the block. It is None if another profiler runs, since torch allows only one.
    """
    # The profiler that torch.profiler replaced: it needs no Kineto, which writes to the standard error where it finds
    # no GPU, and starts a thread. Both record the same operations. Its own reading of the records fails where an
    # operation had begun before, as the forward of DDP has.
    config = _config.ProfilerConfig(_config.ProfilerState.CPU, *(False,) * 5, _config._ExperimentalConfig())
    try:
        _profiler._enable_profiler_legacy(config)
    except RuntimeError as error:
        if "already enabled" not in str(error):
            raise
        yield None
        return
    found: list[OperationEvent] = []
    try:
        yield found
    finally:
        for records in _profiler._disable_profiler_legacy():  # those of one thread
            running: dict[int, OperationEvent] = {}
            for record in records:
                if record.kind() == "push":
                    event = OperationEvent(record.name(), caller=next(reversed(running.values()), None))
                    if event.caller is not None:
                        event.caller.called.append(event)
                    running[record.handle()] = event
                    found.append(event)
                elif record.kind() == "pop":
                    running.pop(record.handle(), None)  # none of what began before the recording


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has hooks that run before or after each of its steps."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, name, ()) for name in names)


def is_in_backward() -> bool:
    """Return whether this thread runs a backward, such as while it recomputes a checkpointed forward."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def unseen_by_modes() -> AbstractContextManager[object]:
    """Return a context whose operations on plain tensors no dispatch mode sees."""
    # Selective checkpointing replays the operations that its mode saw, and others count them; an observer's own must
    # not be among them.
    return torch._C._DisableTorchDispatch()  # pyright: ignore[reportPrivateUsage]


def compiled_part(module: nn.Module) -> str | None:
    """Return "call" if a module's call with all hooks is compiled, "forward" if only its forward is, or None."""
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:  # pyright: ignore[reportPrivateUsage]
        return "call"
    if "_orig_mod" in module._modules or hasattr(module.forward, "_torchdynamo_orig_callable"):  # pyright: ignore[reportPrivateUsage]
        return "forward"
    return None


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper; another module is returned as it is."""
    return dict(model.named_children()).get(COMPILED_PREFIX.rstrip("."), model)


def values_of_sparse(gradient: Tensor) -> Tensor:
    """Return the values of a sparse tensor without a copy. The value of one place may be stored in several parts."""
    return gradient._values()  # pyright: ignore[reportPrivateUsage]
