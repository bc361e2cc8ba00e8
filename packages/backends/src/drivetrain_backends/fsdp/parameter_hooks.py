"""Users' hooks on parameters, moved to where autograd delivers gradients.

Autograd does not reach a shard: it delivers each rank's own full gradient to the gathered parameter, as under DDP to
the parameter itself. The hooks therefore run there, before ranks average, with tensors of full shape.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor

from drivetrain_backends.compat import Hooks, parameters_with_hooks, take_hooks
from drivetrain_backends.errors import UnshardedParameterError
from drivetrain_backends.fsdp.compat import gathered_parameter
from drivetrain_backends.fsdp.sharded_model import ShardedModel


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
        """Refuse to step after a backward that ran no hooks, as `loss.backward()` may."""
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
        """Attach the hooks to the gathered parameter, which stays the same object from its first gather on."""
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
