"""Sharded parameters that a program's own code can use like full parameters, with the user's hooks on them.

A DTensor refuses operations with plain tensors, and `p.data = ...` does not change its shard. Autograd does not reach
a shard: it delivers this rank's full gradient to the gathered parameter, as DDP's does to the parameter itself. The
user's hooks therefore run on the gathered parameter, before ranks average, with tensors of full shape.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from drivetrain_backends.compat import Hooks, as_they_are, parameters_with_hooks, take_hooks
from drivetrain_backends.errors import UnshardedParameterError
from drivetrain_backends.fsdp.compat import (
    ASSERTS_ONE_CLASS,
    compiled_key,
    gathered_parameter,
    run_as_dtensors,
    tree_map_only,
)
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel
from drivetrain_backends.state_dict.dtensor import local, own_part, sharded_like

_ATTRIBUTES = ("__get__", "__set__", "__delete__")
_STORAGES = ("storage", "untyped_storage")
_IN_PLACE_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__")
_ELEMENTWISE = (
    *("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_"),
    *("clamp_", "clamp_min_", "clamp_max_"),
)
_AS_IT_IS: Any = DTensor.__torch_function__


class ShardedParameter(DTensor):
    """A parameter that `fully_shard` divided. Full tensors can be assigned to it and copied into it."""

    __slots__ = ()
    name_in_model: str  # the parameter's name in its model
    if ASSERTS_ONE_CLASS:
        __torch_dispatch__ = classmethod(run_as_dtensors)  # pyright: ignore[reportAssignmentType]

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values without autograd, as a sharded tensor; assigned values are copied into the shard."""
        return self._take_over(Tensor.data.__get__(self))  # pyright: ignore[reportAttributeAccessIssue]

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:
            return
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise UnshardedParameterError(
                f"{self.name_in_model}, of {_describe(self)}, is assigned {_describe(value)} after prepare(), as by "
                "p.data = ... or model.to(...): FSDP has sized its memory for what prepare() divided. Convert or "
                "move the model before prepare(); values of the same shape and dtype can be assigned"
            )
        with torch.no_grad():
            self.copy_(value)

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Copy values, full or sharded, in place; each rank takes its part of a full tensor."""
        if isinstance(src, DTensor) or (torch.is_grad_enabled() and self.requires_grad):
            return super().copy_(src, non_blocking)
        local(self).copy_(own_part(src.expand(self.shape), self), non_blocking)
        return self

    def detach(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the sharded values without autograd, as a tensor of this class, for a state dict."""
        return self._take_over(super().detach())

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Any = super().detach().clone()
        copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = copied
        return copied

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors: Any, *about: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # torch.compile builds what it traces by it, and asserts in each call that tensors are of that class.
        values: Any = DTensor.__tensor_unflatten__(inner_tensors, *about)
        values.__class__ = cls
        values.name_in_model = "a parameter in a compiled function"
        return values

    def _stable_hash_for_caching(self) -> str:
        # In the key of a compiled function on disk: one that was compiled for plain DTensors refuses these.
        return f"{compiled_key(self)} {type(self).__name__}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_file(self)
        return super().detach().__reduce_ex__(protocol)

    def _take_over(self, values: Any) -> Tensor:
        values.__class__ = type(self)
        values.name_in_model = self.name_in_model
        return values


class ProgramUse:
    """The use of sharded parameters by a program's own code outside the model's forward, where FSDP does not gather.

    An operation that autograd records, or that also has plain tensors, computes with full parameters. Their gradients
    are averaged over ranks, like the model's gradients. All ranks must run such operations in the same order.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], in_forward: Callable[[], bool]) -> None:
        def run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del cls
            if func.__name__ in _ATTRIBUTES or in_forward():
                return _AS_IT_IS(func, types, args, kwargs or {})
            return _compute(func, types, args, kwargs or {})

        self._given: Any = classmethod(run)
        # Of a model's own, so that models are trained, and end, independently of each other.
        self._class: Any = type(
            "ShardedParameter", (ShardedParameter,), {"__slots__": (), "__module__": __name__}
        )
        self._parameters: dict[str, Any] = dict(named)
        self.adopt()
        self.begin()

    @property
    def are_kept(self) -> bool:
        """True if no parameter was converted; a conversion makes a parameter a plain DTensor."""
        return set(map(type, self._parameters.values())) <= {self._class}

    def adopt(self) -> None:
        """Make every sharded parameter an instance of `ShardedParameter`."""
        for name, parameter in self._parameters.items():
            parameter.__class__ = self._class
            parameter.name_in_model = name

    def begin(self) -> None:
        """Let operations of the program's own code compute with full parameters from now on."""
        self._class.__torch_function__ = self._given

    def end(self) -> None:
        """Leave every operation to torch, from now on."""
        self._class.__torch_function__ = _AS_IT_IS


def _compute(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation: on full parameters if it is part of a loss, otherwise on shards."""
    name = func.__name__
    if name in _STORAGES:
        _refuse_file(args[0])
    if name == "view_as" and args[0] is args[1]:
        _refuse_node(args[0])
    is_in_place = name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    try:
        result = _AS_IT_IS(func, types, args, kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if func is torch.autograd.grad:
            _refuse_gradient(error)
        if not is_in_place:
            return _compute_on_full(func, args, kwargs)
        if "got mixed torch.Tensor and DTensor" not in str(error):
            raise
        if name not in _ELEMENTWISE and name not in _IN_PLACE_OPERATORS:
            raise UnshardedParameterError(
                f"{name}() of a sharded parameter, in place and with a tensor that is not sharded: change the full "
                "parameters inside accelerator.gathered(model, write=True)"
            ) from error
        return _write_in_place(func, types, args, kwargs)
    results: Iterable[Any] = result if isinstance(result, (tuple, list)) else (result,)
    is_differentiable = any(isinstance(one, DTensor) and one.requires_grad for one in results)
    if is_in_place or not is_differentiable or any(result is arg for arg in args):
        return result
    return _compute_on_full(func, args, kwargs)


def _write_in_place(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Write in place by an elementwise operation; a full tensor among `args` is cut to this rank's part."""
    target = args[0]

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or isinstance(tensor, DTensor):
            return tensor
        return sharded_like(own_part(tensor.expand(target.shape), target).to(target.device), target)

    args, kwargs = tree_map_only(Tensor, part, (args, kwargs))
    return _AS_IT_IS(func, types, args, kwargs)


def _compute_on_full(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(DTensor, _whole, (args, kwargs))
    return func(*args, **kwargs)


def _whole(sharded: Any) -> Tensor:
    """Return the full tensor; ranks average its gradient in backward. Called on all ranks."""
    with as_they_are():
        if not (sharded.requires_grad and torch.is_grad_enabled()):
            return sharded.detach().full_tensor()
        whole = sharded.full_tensor(grad_placements=[Partial("avg")] * sharded.device_mesh.ndim)
        if sharded.is_leaf and sharded.device.type != "cpu":

            def wait(_: Tensor) -> None:
                # FSDP may still be reducing a gradient on another stream, to which autograd adds next.
                if sharded.grad is not None:
                    torch.accelerator.synchronize()

            whole.register_hook(wait)
        return whole


def _refuse_gradient(error: Exception) -> NoReturn:
    if "not have been used in the graph" not in str(error):
        raise error
    raise UnshardedParameterError(
        "torch.autograd.grad(loss, model.parameters()) through a model that FSDP sharded: its forward computes with "
        "gathered parameters, which these are not. Call accelerator.backward(loss) and read the shards' .grad; or "
        "use backend='ddp'"
    ) from error


def _refuse_file(parameter: Any) -> None:
    """Refuse to write a sharded parameter into a file, which would hold only this rank's part."""
    if local(parameter).shape != parameter.shape:
        raise UnshardedParameterError(
            f"{parameter.name_in_model} is pickled or written to a file, as by torch.save(model.state_dict()) and "
            f"save_pretrained(folder), and this rank holds {tuple(local(parameter).shape)} of its "
            f"{tuple(parameter.shape)}: the file would lack the other ranks' rows. Call "
            "accelerator.get_state_dict(model) on all ranks, and save what it returns (save_pretrained(folder, "
            "state_dict=...)); or save_model() or save_state()"
        )


def _refuse_node(parameter: Any) -> NoReturn:
    """Refuse to return the autograd node that accumulates a shard's gradient: no backward reaches the node."""
    raise UnshardedParameterError(
        f"the node that adds up the gradient of {parameter.name_in_model}, as register_multi_grad_hook and "
        "get_gradient_edge ask for: FSDP lets gradients come to gathered parameters, so that the hook would never "
        "run. parameter.register_hook and register_post_accumulate_grad_hook run under FSDP; backend='ddp' takes all"
    )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)} on {tensor.device.type}"


class ParameterHooks:
    """The hooks on a sharded model's parameters."""

    def __init__(self, sharded: ShardedModel, before: Mapping[str, Tensor]) -> None:
        self._carried: dict[Tensor, _Carried] = {}
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in sharded.parameters.items()}
        self._carriers = {p.sharded_param: p for p in sharded.divided()}
        for name, old in before.items():
            shard = sharded.parameters[name]
            if shard in self._carriers and old is not shard:
                self._take_up(old, shard)
                _refuse_more(old, name)

    def carry(self) -> None:
        """Move hooks that were registered since the last call, and attach all for the coming backward."""
        for shard in self._set_on_shards():
            self._take_up(shard, shard)
        for carried in self._carried.values():
            carried.attach()

    def check_carried(self) -> None:
        """Refuse to step if the last backward ran without the user's hooks, as `loss.backward()` may."""
        waiting = [shard for shard, carried in self._carried.items() if carried.is_waiting]
        if waiting := [*waiting, *self._set_on_shards()]:
            raise UnshardedParameterError(
                f"{self._names[waiting[0]]} has a hook that loss.backward() does not run, as FSDP gathers the "
                "parameter: call accelerator.backward(loss) in its place"
            )

    def _set_on_shards(self) -> list[Tensor]:
        return parameters_with_hooks(self._carriers)

    def _take_up(self, source: Any, shard: Tensor) -> None:
        of_gradient, of_parameter = take_hooks(source)
        if not of_gradient and not of_parameter:
            return
        carried = self._carried.setdefault(shard, _Carried(self._carriers[shard]))
        if of_gradient:
            # Drop a dict whose hooks were all removed: a loop may register and remove one at each step.
            carried.of_gradient[:] = [*filter(None, carried.of_gradient), of_gradient]
        if of_parameter:  # torch would run a shard's hooks after the reduction, on part of the gradient
            carried.of_parameter[:] = [*filter(None, carried.of_parameter), of_parameter]


class _Carried:
    """The hooks of one parameter."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self.of_gradient: list[Hooks] = []
        self.of_parameter: list[Hooks] = []
        self._is_attached = False

    @property
    def is_waiting(self) -> bool:
        """True if the hooks are not yet attached although the parameter was gathered."""
        gathered = gathered_parameter(self._parameter)
        return not self._is_attached and gathered is not None and gathered.requires_grad

    def attach(self) -> None:
        """Attach the hooks to the gathered parameter; it stays the same object from its first gather on."""
        gathered = gathered_parameter(self._parameter)
        if self.is_waiting and gathered is not None:
            gathered.register_hook(self._run_on_gradient)
            gathered.register_post_accumulate_grad_hook(self._run_on_parameter)
            self._is_attached = True

    def _run_on_gradient(self, gradient: Tensor) -> Tensor:
        for hook in _all_of(self.of_gradient):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def _run_on_parameter(self, parameter: Tensor) -> None:
        for hook in _all_of(self.of_parameter):
            hook(parameter)


def _all_of(registered: list[Hooks]) -> Iterator[Callable[[Tensor], Any]]:
    return (hook for hooks in registered for hook in list(hooks.values()))


def _refuse_more(old: Any, name: str) -> None:
    """Make a parameter that was replaced by its shard refuse new hooks."""

    def refuse(_: object) -> NoReturn:
        raise UnshardedParameterError(
            f"a hook on {name} as it was before prepare(), which sharded it: take the parameter anew from "
            "model.named_parameters()"
        )

    old.register_hook = old.register_post_accumulate_grad_hook = refuse
