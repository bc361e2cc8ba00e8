"""The model of one rank, divided and sharded by the transforms of a run, over ranks that do not exist."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drivetrain_backends.fsdp.plan import Sharding, TensorStorage, plan_dtypes
from drivetrain_backends.fsdp.shard import block_groups, shard_block
from drivetrain_backends.modules.activation_checkpointing import checkpoint_activations
from drivetrain_backends.modules.autocast_forward import prepare_forward
from drivetrain_backends.modules.wrap_policy import plan_blocks
from drivetrain_backends.settings import FSDPSettings
from drivetrain_parallel import (
    divide_between_layers,
    divide_model,
    divide_sequences,
    plan_between_layers,
    plan_model,
    plan_sequences,
)
from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.errors import PlanError
from drivetrain_plan.model.layers import find_stacks
from drivetrain_plan.model.source import BuiltSource
from drivetrain_plan.model.training_modes import TrainingMode
from drivetrain_plan.program.fake_ranks import FakeRanks
from drivetrain_precision import choose_policy
from drivetrain_precision.dtypes.dtype_policy import DtypePolicy

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """A rank's model on meta, and the ranks that it sends to."""

    module: nn.Module
    blocks: tuple[nn.Module, ...]  # of the lists that repeat them
    ranks: tuple[FakeRanks, ...]


def build_rank(
    source: BuiltSource,
    choice: PlanChoice,
    mode: TrainingMode,
    kept: Mapping[tuple[str, int], int] | None = None,
    *,
    mesh: DeviceMesh | None,
) -> RankModel:
    """Build what the first rank of a choice holds of a model; a PlanError says that it cannot be divided so.

    Pipeline and expert are no part of a rank's program here. `kept` has the number of blocks to keep of each make,
    None for all; FSDP shards the model over `mesh`, of `sharding_sizes`.
    """
    model = source.build(kept)
    repeated = tuple(block for name in find_stacks(model) for block in model.get_submodule(name).children())
    ranks = _divide(model, choice)
    plan = plan_blocks(model, asked="fsdp.wrap")
    blocks = [model.get_submodule(name) for name in plan.blocks]
    checkpoint_activations(blocks or [model], choice.checkpointing)
    policy = choose_policy("no" if mode.autocast is None else "bf16", _CPU)
    if mesh is not None:
        dtypes = plan_dtypes(FSDPSettings(), policy)
        storage = TensorStorage(model, dtypes, frozenset())
        sharding = Sharding(
            mesh=mesh,
            experts=None,
            reshards=choice.strategy == "full_shard",
            dtypes=dtypes,
            offload=False,
            pin_memory=False,
        )
        for name, group in block_groups(model, plan).items():
            for parameter in dict.fromkeys(p for module in group for p in module.parameters(recurse=False)):
                parameter.data = parameter.data.to(storage.dtype_of(parameter))
            inner = model.get_submodule(name)
            shard_block(inner, group, sharding, storage, is_root=not name, is_alone=not plan.blocks)
        policy = replace(policy, autocast_dtype=None, dtypes=DtypePolicy(output=policy.dtypes.output))
    prepare_forward(model, policy, _CPU)
    return RankModel(module=model, blocks=repeated, ranks=ranks)


def sharding_sizes(choice: PlanChoice) -> dict[str, int]:
    """Return the sizes of the mesh that FSDP shards over, by axis."""
    sizes = {"data": choice.data, "shard": choice.num_dividing}
    if choice.data == 1 and choice.strategy != "none":
        del sizes["data"]
    return sizes


def _divide(model: nn.Module, choice: PlanChoice) -> tuple[FakeRanks, ...]:
    """Divide layers and sequences, in the order of a run."""
    ranks: list[FakeRanks] = []
    if choice.tensor > 1:
        plan = plan_model(model, choice.tensor)
        if not plan.layers:
            raise PlanError(f"no layer of {type(model).__name__} can be divided among {choice.tensor} ranks")
        ranks.append(FakeRanks(choice.tensor, "tensor"))
        between = plan_between_layers(model, plan) if choice.sequence else None
        divide_model(model, plan, ranks[-1], device=_CPU)
        if between is not None:
            divide_between_layers(model, replace(between, compared=frozenset()), ranks[-1], device=_CPU)
    if choice.context > 1:
        sequences = plan_sequences(model, choice.context)
        if not sequences.blocks:
            raise PlanError(f"{type(model).__name__} has no list of blocks whose sequences could be divided")
        ranks.append(FakeRanks(choice.context, "context"))
        divide_sequences(model, replace(sequences, compared=frozenset()), ranks[-1], device=_CPU)
    return tuple(ranks)
