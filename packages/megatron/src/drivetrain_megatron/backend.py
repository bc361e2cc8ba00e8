"""The backend: models of Megatron's layers as replicas of parts, with gradients averaged over replicas by DDP."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_backends import DDPBackend, DDPSettings
from drivetrain_backends.composed.divided_layers import WholeWeightsGuard
from drivetrain_backends.composed.divided_layout import DividedLayout
from drivetrain_backends.composed.staged_prepared import StagedPrepared
from drivetrain_backends.composed.state_layout import StateLayout
from drivetrain_backends.composed.strategy import ModelTransform, Strategy
from drivetrain_backends.modules.compile import strip_wrapper_prefix, unwrap_compiled
from drivetrain_backends.optim.divided_trial import check_steps_parts
from drivetrain_backends.state_dict.dtensor import broadcast_parts
from drivetrain_backends.state_dict.tensor_part import TensorDivision
from drivetrain_megatron.compat import EXTRA_STATE
from drivetrain_megatron.divisions import find_cuts
from drivetrain_megatron.groups import check_axes, open_parallel_state
from drivetrain_megatron.settings import MegatronSettings
from drivetrain_megatron.stages import BuiltStageLayout, BuiltStages, ScheduledPrepared
from drivetrain_messages import format_count
from drivetrain_precision import is_low_bit
from drivetrain_state import Context, synchronize_rng_states


class MegatronBackend(DDPBackend):
    """A backend for models of Megatron's layers, which are built after it and hold this rank's parts.

    Megatron's parallel state is made of the mesh, and lives as long as that. The step is that of the prepared
    torch optimizer over each rank's parts.

    Raises:
        ValueError: The mesh has an axis along which such models are not divided.
        RuntimeError: The context has no process group, or Megatron's groups are of another mesh.
    """

    settings_section: ClassVar[str | None] = "megatron"
    settings_type: ClassVar[type[Any] | None] = MegatronSettings
    staged: ClassVar[type[StagedPrepared]] = ScheduledPrepared

    def compose(self) -> Strategy:
        """Return the strategy of replicas, over models that arrive in parts."""
        check_axes(self.context)
        open_parallel_state(self.context)
        adopt = AdoptParts(self.context)
        given: MegatronSettings = self.settings
        self.settings = DDPSettings(
            find_unused_parameters=given.find_unused_parameters,
            bucket_size_mb=given.bucket_size_mb,
            check_drift_every=given.check_drift_every,
        )
        strategy = super().compose()
        layout = PartsLayout(strategy.layout, adopt)
        guards = strategy.guards
        if self.context.ranks("replica").size > 1:
            strategy.gradients.partners = self.context.ranks("replica").process_group
        if self.context.ranks("tensor").size > 1:
            guards = (*guards, WholeWeightsGuard(layout))
        stages = BuiltStages(self.context, self.policy) if self.context.ranks("pipeline").size > 1 else None
        before = (adopt,) if stages is None else (stages, adopt)
        return replace(
            strategy,
            transforms=(*before, *strategy.transforms),
            layout=layout if stages is None else BuiltStageLayout(layout, stages),
            guards=guards,
            stages=stages,
        )

    def across(self, strategy: Strategy) -> Strategy:
        """Return the strategy as it is: Megatron's layers are divided by themselves."""
        return strategy


class AdoptParts(ModelTransform):
    """Find what this rank holds of a model, and have ranks of `tensor` agree on the rest.

    Attributes:
        divisions: The division of each model's parameters that are divided, by name.
        by_parameter: The division of each of these parameters.
    """

    def __init__(self, context: Context) -> None:
        self.divisions = WeakIdKeyDictionary()
        self.by_parameter = WeakIdKeyDictionary()
        self._context, self._ranks = context, context.ranks("tensor")
        self._plans: dict[nn.Module, dict[Tensor, TensorDivision]] = {}
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._shown: dict[str, str] = {}

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Find the cuts of new models; refuse models and optimizers that cannot be trained in parts.

        Raises:
            ValueError: A model was built for other options than are trained here, or an optimizer keeps states that
                cannot be divided.
        """
        self._plans.clear()
        size = self._ranks.size
        for model in map(unwrap_compiled, models):
            check_options(model)
            cuts = find_cuts(model, rank=self._ranks.index, size=size)
            self._plans[model] = {
                parameter: TensorDivision(cut=cut, ranks=self._ranks) for parameter, cut in cuts.items()
            }
        is_trained = any(p.requires_grad for model in models for p in model.parameters())
        if size > 1 and is_trained and not self.by_parameter and not any(self._plans.values()):
            kinds = ", ".join(sorted({type(model).__name__ for model in models}))
            raise ValueError(
                f"tensor={size}: no layer of {kinds} is one of Megatron's; megatron_from_transformers() converts "
                "models of transformers, and backend='ddp' divides other models as they are"
            )
        for optimizer in optimizers if any(self._plans.values()) else ():
            if is_low_bit(optimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} under tensor={size}: blocks of low-bit states cross the parts of a "
                    "weight; use an optimizer with states in floating point"
                )
            check_steps_parts(optimizer, self._context, num_ranks=size)

    def apply(self, model: nn.Module) -> nn.Module:
        """Give what ranks of `tensor` hold whole the values of the first of them. Called on all ranks."""
        inner = unwrap_compiled(model)
        found = self._plans.pop(inner)
        self.by_parameter.update(found)
        self.divisions[model] = {
            strip_wrapper_prefix(name): found[parameter]
            for name, parameter in inner.named_parameters(remove_duplicate=False)
            if parameter in found
        }
        if self._ranks.size > 1:
            tensors = (*inner.parameters(), *inner.buffers())
            shared = [one for one in tensors if one not in self.by_parameter]
            broadcast_parts(shared, self._context, over="tensor")
            # Outside of divided layers these ranks drop the same elements; inside, Megatron tells them apart.
            synchronize_rng_states(self._context, ("torch", "accelerator"), over="tensor")
            self._handles[model] = [
                parameter.register_hook(reduce_over_tensor(self._ranks.process_group, mean=mean))
                for parameter, mean in found_in_parts(inner)
            ]
        self._shown[type(inner).__name__] = format_count(len(found), "parameter")
        return model

    def release(self, model: nn.Module) -> None:
        """Leave gradients on their ranks; the model stays in parts."""
        for handle in self._handles.pop(model, ()):
            handle.remove()

    def applied(self) -> Mapping[str, object]:
        """Return what is divided, in words."""
        said = "; ".join(f"{kind}: {count}" for kind, count in self._shown.items())
        return {"divided": f"among {self._ranks.size} ranks (tensor): {said}"} if said else {}


class PartsLayout(DividedLayout):
    """The layout of models that arrive in parts, over that of replicas."""

    def __init__(self, inner: StateLayout, adopt: AdoptParts) -> None:
        super().__init__(inner, adopt.divisions, adopt.by_parameter, replaced=WeakIdKeyDictionary())

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict, without the empty entries of Megatron's layers, which no other layer has."""
        state = super().model_state(model)
        return {
            name: value
            for name, value in state.items()
            if value is not None or not name.endswith(EXTRA_STATE)
        }


def check_options(model: nn.Module) -> None:
    """Refuse options of a model that only Megatron's own optimizer and buffers of gradients carry out."""
    config: Any = getattr(model, "config", None)
    for name in ("gradient_accumulation_fusion", "defer_embedding_wgrad_compute", "delay_wgrad_compute"):
        if getattr(config, name, False):
            raise ValueError(
                f"{type(model).__name__}.config.{name}=True: gradients would go to a buffer of Megatron's own and "
                f"never be stepped on; build the model with {name}=False"
            )
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_num_layers"):
        if getattr(config, name, None):
            raise ValueError(
                f"{type(model).__name__}.config.{name}={getattr(config, name)!r}: Megatron adds this loss in "
                "backward, where the run's normalisation does not reach it; build the model without it"
            )


def found_in_parts(model: nn.Module) -> list[tuple[nn.Parameter, bool]]:
    """Return the parameters that ranks hold alike and whose gradients each finds a part of; with whether to average.

    These are, by Megatron's marks, norms and others between layers under `sequence_parallel`, and the norms of each
    rank's own query and key heads.
    """
    found: list[tuple[nn.Parameter, bool]] = []
    config: Any = getattr(model, "config", None)
    for name, parameter in model.named_parameters():
        is_of_heads = getattr(config, "qk_layernorm", False) and (
            "q_layernorm" in name or "k_layernorm" in name
        )
        is_mean = getattr(parameter, "average_gradients_across_tp_domain", False)
        if parameter.requires_grad and (
            is_mean or is_of_heads or getattr(parameter, "sequence_parallel", False)
        ):
            found.append((parameter, is_mean))
    return found


def reduce_over_tensor(group: Any, *, mean: bool) -> Callable[[Tensor], Tensor]:
    """Return a hook that adds a gradient up over the ranks of `tensor`, or averages it, as backward finds it."""

    def reduce(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group) if mean else total

    return reduce
