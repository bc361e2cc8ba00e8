"""A sharded model: its blocks, and the module attributes that hold each parameter."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drivetrain_backends.compat import parameters_in
from drivetrain_backends.errors import UnshardedParameterError
from drivetrain_backends.fsdp import compat
from drivetrain_backends.modules.wrap_policy import BlockPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlot:
    """A module attribute that holds a parameter; a tied parameter has several slots."""

    module: nn.Module  # the module that holds the parameter
    attribute: str  # the parameter's name in the module
    name: str  # the parameter's name in the model
    parameter: nn.Parameter  # the parameter that `prepare` left there


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedModel:
    """A model whose parameters are shards."""

    module: nn.Module
    plan: BlockPlan  # the plan of the module's blocks
    blocks: tuple[FSDPModule, ...]  # the separately sharded modules, the root last
    places: tuple[ParameterSlot, ...]  # the place of every parameter
    upcast: tuple[str, ...] = ()  # the names of parameters converted from half precision to fp32
    parameters: dict[str, nn.Parameter] = field(init=False)  # every parameter once, by the first of its names
    # The parameters that every rank holds in full: scalars, empty ones, and those of dtypes without gradients.
    plain: dict[str, nn.Parameter] = field(init=False)
    known: frozenset[Tensor] = field(init=False)  # the set of all parameters

    def __post_init__(self) -> None:
        parameters: dict[str, nn.Parameter] = {}
        seen: set[nn.Parameter] = set()
        for place in self.places:
            if place.parameter not in seen:
                seen.add(place.parameter)
                parameters[place.name] = place.parameter
        plain = {name: p for name, p in parameters.items() if not isinstance(p, DTensor)}
        object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "plain", plain)
        object.__setattr__(self, "known", frozenset(seen))

    def reshard(self) -> None:
        """Release gathered parameters, so that the modules hold their shards again."""
        for block in self.blocks:
            block.reshard()

    def assign(self, values: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Put other parameters, or the model's own again, into the modules' attributes."""
        for place in self.places:
            setattr(place.module, place.attribute, values[place.parameter])

    def standing_in(self) -> dict[Tensor, nn.Parameter]:
        """Return a map from the gathered parameters that FSDP puts into the modules to their shards."""
        return {
            gathered: parameter.sharded_param
            for parameter in self.divided()
            if (gathered := compat.gathered_parameter(parameter)) is not None
        }

    def holds_gradients(self) -> bool:
        """Return whether unreduced backwards left full gradients."""
        return any(map(compat.holds_full_gradient, self.divided()))

    def drop_held(self) -> None:
        """Drop the full gradients that unreduced backwards left."""
        for parameter in self.divided():
            compat.drop_full_gradient(parameter)

    def in_backward(self) -> bool:
        """Return whether a backward has begun but not ended; True also after a backward that raised an error."""
        return compat.backward_is_open(self.blocks[-1])

    def divided(self) -> Iterator[Any]:
        """Yield torch's own object for each sharded parameter."""
        for block in self.blocks:
            yield from compat.sharded_parameters(block)

    def check(self, *, thoroughly: bool = False) -> None:
        """Refuse parameters that were reassigned since `prepare`. Call it only while no parameter is gathered.

        With `thoroughly`, search all modules for new parameters, and refuse these too.
        """
        for place in self.places:
            if parameters_in(place.module).get(place.attribute) is not place.parameter:
                raise UnshardedParameterError(
                    f"{place.name} was re-assigned after prepare(): {_NEITHER}. Change its values in place, inside "
                    "gathered(write=True), or build the model before prepare()"
                )
        if thoroughly:
            for name, parameter in self.module.named_parameters():
                if parameter not in self.known:
                    raise UnshardedParameterError(
                        f"{name} was created after prepare(): {_NEITHER}. Build the whole model before prepare()"
                    )


_NEITHER = "the new tensor is not sharded, its gradients are not averaged, and the optimizer does not step it"


def find_places(model: nn.Module) -> Iterator[ParameterSlot]:
    """Yield the slots of a model's parameters, in the order of the modules."""
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            yield ParameterSlot(module=module, attribute=attribute, name=name, parameter=parameter)
