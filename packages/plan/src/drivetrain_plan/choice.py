"""A choice of how to train: what divides the model and the batch, as frozen values. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from drivetrain_state.mesh import MeshPlan, ParallelDims

Strategy = Literal["none", "full_shard", "shard_grad_op", "zero1", "zero2", "zero3"]
Offload = Literal["none", "host", "nvme"]
Checkpointing = Literal["none", "selective", "full"]
# What each backend that a choice may be of fixes of it.
FIXED_BY: Mapping[str, Mapping[str, Any]] = {
    "single": {},
    "ddp": {},
    "fsdp": {},
    "deepspeed": {},
    # Its models are divided among data, tensor and pipeline, and stay on the devices.
    "megatron": {
        "is_built": True, "shard": 1, "context": 1, "expert": 1, "strategy": "none", "offload": "none",
    },
}  # fmt: skip

_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
_STAGE_NAMES = {name: f"ZeRO {stage} of" for name, stage in _STAGES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """A way to train on a number of devices.

    Attributes:
        data: The number of replicas that read different samples.
        shard: The number of ranks that divide one replica's parameters and read different samples.
        strategy: The name of what the ranks of `shard` divide, by FSDP or by DeepSpeed's stages; "none" without them.
        offload: The memory that keeps parameters and optimizer states between uses; "none" for the devices' own.
        checkpointing: The part of each block that is computed again in backward: "selective" is all but matrix
            products and attention.
        is_built: Whether the loop builds the model of Megatron-Core's layers, which divide and recompute.
        sequence: Whether ranks of `tensor` also divide what stands between divided layers.
        micro_batch: The samples of one forward of a rank.
        accumulation: The micro-batches of one optimizer step.
    """

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    strategy: Strategy = "none"
    offload: Offload = "none"
    checkpointing: Checkpointing = "none"
    is_built: bool = False
    sequence: bool = False
    micro_batch: int = 1
    accumulation: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return prod((self.pipeline, self.data, self.shard, self.context, self.tensor))

    @property
    def num_readers(self) -> int:
        """The number of ranks, or groups of ranks, that read different samples."""
        return self.data * self.shard

    @property
    def num_dimensions(self) -> int:
        """The number of parallel dimensions with several ranks; fewer are simpler."""
        sizes = (self.pipeline, self.data, self.shard, self.context, self.tensor, self.expert)
        return sum(size > 1 for size in sizes)

    @property
    def num_dividing(self) -> int:
        """The number of ranks that FSDP or ZeRO divides a parameter among: those of shard and context."""
        return self.shard * self.context if self.strategy != "none" else 1

    @property
    def by_stages(self) -> bool:
        """True if DeepSpeed's engine trains so."""
        return self.strategy in _STAGES

    @property
    def by_blocks(self) -> bool:
        """True if FSDP holds the model's blocks, which also computes their activations again."""
        asked = self.strategy != "none" or self.checkpointing != "none"
        return asked and not self.is_built and not self.by_stages

    @property
    def in_buckets(self) -> bool:
        """True if gradients of replicas are averaged in DDP's buckets, which last."""
        return not self.by_stages and not self.by_blocks and self.data * self.context > 1

    @property
    def backend(self) -> str:
        """The name of the backend that trains so."""
        if self.is_built or self.by_stages:
            return "megatron" if self.is_built else "deepspeed"
        return "fsdp" if self.by_blocks else "ddp" if self.in_buckets else "single"

    @property
    def name(self) -> str:
        """The choice in few words, such as "FSDP 8 x tensor 4, recomputed"."""
        sharding = {"full_shard": "FSDP", "shard_grad_op": "FSDP grad-op", **_STAGE_NAMES}
        said = [f"pipeline {self.pipeline}"] if self.pipeline > 1 else []
        said += [f"DDP {self.data}"] if self.data > 1 else []
        if self.strategy != "none":
            said.append(
                f"{sharding[self.strategy]} {self.shard}" if self.shard > 1 or self.context == 1 else "FSDP"
            )
        for axis in ("context", "tensor", "expert"):
            said += [f"{axis} {getattr(self, axis)}"] if getattr(self, axis) > 1 else []
        name = " x ".join(said) or "one device"
        name += ", Megatron's layers" if self.is_built else ""
        name += ", sequence" if self.sequence else ""
        name += {"none": "", "selective": ", recomputed in part", "full": ", recomputed"}[self.checkpointing]
        return name if self.offload == "none" else f"{name}, offloaded to {self.offload}"

    def without_batch(self) -> "PlanChoice":
        """Return the choice with the smallest micro-batch: what divides the model alone."""
        return replace(self, micro_batch=1, accumulation=1)

    def dims(self) -> ParallelDims | None:
        """Return the section `parallel` of this choice; None for a run that is data parallel alone, or sharded."""
        said: dict[str, Any] = {
            axis: size
            for axis in ("pipeline", "context", "tensor", "expert")
            if (size := getattr(self, axis)) > 1
        }
        if self.sequence and not self.is_built:
            said["sequence"] = True
        if self.pipeline > 1:  # whose micro-batches are pieces of one batch
            said["pipeline_micro_batches"] = self.accumulation
        if said:
            said |= {axis: size for axis in ("data", "shard") if (size := getattr(self, axis)) > 1}
        return ParallelDims(**said) if said else None

    def model_options(self) -> dict[str, Any]:
        """Return the arguments of Megatron's `TransformerConfig` that build a model for this choice."""
        options: dict[str, Any] = {"sequence_parallel": True} if self.sequence else {}
        if self.checkpointing == "full":
            options |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        return options

    def mesh(self) -> MeshPlan:
        """Return the mesh of this choice, with all axes."""
        sizes = {axis: getattr(self, axis) for axis in ("pipeline", "data", "shard", "context", "tensor")}
        return ParallelDims(**sizes, expert=self.expert).plan(self.num_devices)

    def sections(self, mixed_precision: str = "no") -> dict[str, dict[str, Any]]:
        """Return the settings that train so, by section and field, as a settings file has them."""
        run: dict[str, Any] = {"backend": self.backend, "mixed_precision": mixed_precision}
        if self.accumulation > 1 and self.pipeline == 1:
            run["gradient_accumulation_steps"] = self.accumulation
        found: dict[str, dict[str, Any]] = {"run": run}
        if self.checkpointing != "none" and not self.is_built:
            found["model"] = {"activation_checkpointing": self.checkpointing}
        if (dims := self.dims()) is not None:
            fields = {name: getattr(dims, name) for name in dims.__slots__}
            found["parallel"] = {name: value for name, value in fields.items() if value not in (None, False)}
        if self.by_blocks:
            fsdp: dict[str, Any] = {}
            hybrid = self.data > 1 and self.shard * self.context > 1
            strategy = "no_shard" if self.strategy == "none" else "hybrid_shard" if hybrid else self.strategy
            fsdp["strategy"] = strategy
            fsdp |= {"shard_size": self.shard} if hybrid and "parallel" not in found else {}
            fsdp |= {"offload": True} if self.offload == "host" else {}
            found["fsdp"] = fsdp
        if self.by_stages:
            section: dict[str, Any] = {"stage": _STAGES[self.strategy]}
            if self.offload != "none":
                place = "cpu" if self.offload == "host" else "nvme"
                divided = ("optimizer", "param") if self.strategy == "zero3" else ("optimizer",)
                section |= {f"offload_{part}": place for part in divided}
            if self.offload == "nvme":
                section["nvme_path"] = "FOLDER_ON_NVME"  # to be filled in, as the names of hosts
            found["deepspeed"] = section
        return found


def pins_of(section: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is fixed of a choice by a backend's section: by the fields that are said; the others stay free."""
    pins: dict[str, Any] = {"backend": section}
    places = {said[name] for name in ("offload", "offload_optimizer", "offload_param") if name in said}
    if places := places - {None}:
        pins["offload"] = "nvme" if "nvme" in places else "host" if places & {True, "cpu"} else "none"
    return pins
