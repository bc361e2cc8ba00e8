"""What is known of a model once it is sharded: its blocks, and which parameter lies where."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drivetrain_backends.errors import UnshardedParameterError
from drivetrain_backends.modules.wrap_policy import BlockPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a module holds a parameter; a tied one has several places.

    Attributes:
        module: The module.
        attribute: The parameter's name in it.
        name: Its name in the model.
        parameter: The parameter that `prepare` left there.
    """

    module: nn.Module
    attribute: str
    name: str
    parameter: nn.Parameter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedModel:
    """A model whose parameters are shards.

    Attributes:
        module: The user's module.
        plan: Which of its modules are blocks.
        blocks: The modules that are sharded on their own, and last the root.
        places: Where every parameter lies.
        upcast: The names of those that were brought to fp32 from half precision.
        parameters: Every parameter once, by the first of its names.
        known: All of them.
        plain: Those that every rank holds whole: scalars, empty ones, and those of a dtype that has no gradients.
    """

    module: nn.Module
    plan: BlockPlan
    blocks: tuple[FSDPModule, ...]
    places: tuple[Place, ...]
    upcast: tuple[str, ...] = ()
    parameters: dict[str, nn.Parameter] = field(init=False)
    plain: dict[str, nn.Parameter] = field(init=False)
    known: frozenset[Tensor] = field(init=False)

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
        """Let go of gathered parameters, so that the modules hold their shards again."""
        for block in self.blocks:
            block.reshard()

    def standing_in(self) -> dict[Tensor, nn.Parameter]:
        """The shard behind each parameter that FSDP puts into the modules while it is gathered."""
        return {
            parameter._unsharded_param: parameter.sharded_param
            for parameter in self.divided()
            if hasattr(parameter, "_unsharded_param")
        }

    def holds_gradients(self) -> bool:
        """Whether backwards without a reduction left whole gradients behind."""
        return any(
            getattr(parameter, "unsharded_accumulated_grad", None) is not None
            or (hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None)
            for parameter in self.divided()
        )

    def drop_held(self) -> None:
        """Forget the whole gradients that backwards without a reduction left behind."""
        for parameter in self.divided():
            if "unsharded_accumulated_grad" in vars(parameter):  # up to some torch before 2.15
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    def in_backward(self) -> bool:
        """Whether a backward has begun that did not end: FSDP waits for an end that an error kept from coming."""
        state: Any = self.blocks[-1]._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
        return state._state_ctx.post_backward_final_callback_queued

    def divided(self) -> Iterator[Any]:
        """What torch keeps for each parameter that it divides."""
        for block in self.blocks:
            for group in parameter_groups(block):
                yield from group.fsdp_params

    def check(self, *, thoroughly: bool = False) -> None:
        """Hold the modules' parameters against those that were sharded; none may be gathered.

        Args:
            thoroughly: Whether to look for new parameters too, which takes a walk through all modules.

        Raises:
            UnshardedParameterError: One was created or re-assigned after `prepare`.
        """
        for place in self.places:
            if getattr(place.module, place.attribute, None) is not place.parameter:
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


_NEITHER = "the new tensor is neither sharded, nor averaged over ranks, nor what the optimizer holds"


def parameter_groups(block: FSDPModule) -> list[Any]:
    """What a block gathers at a time, as torch keeps it; torch tells of it nowhere else."""
    state: Any = block._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before it could be several
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def find_places(model: nn.Module) -> Iterator[Place]:
    """Where the parameters of a model lie, in the order of its modules."""
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            yield Place(module=module, attribute=attribute, name=name, parameter=parameter)
