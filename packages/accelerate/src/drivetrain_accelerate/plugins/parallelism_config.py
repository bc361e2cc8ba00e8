"""The sizes of the parallel dimensions of a run, and their device mesh."""

import warnings
from dataclasses import fields
from math import prod
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain_accelerate.environment_variables import fill_unsaid
from drivetrain_accelerate.plugins.compat import flatten_mesh
from drivetrain_accelerate.plugins.option_fields import becomes, options
from drivetrain_accelerate.plugins.parallelism_handlers import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)

_ENV = "PARALLELISM_CONFIG_"
# In the order of the mesh: the last are neighbours, with the fastest links.
_DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


def _axes(*names: str, doc: str) -> Any:
    return property(lambda self: self._enabled(*names), doc=doc)


def _size(*names: str, doc: str) -> Any:
    return property(lambda self: prod(self._sizes[name] for name in names), doc=doc)


def _is_enabled(name: str, doc: str) -> Any:
    return property(lambda self: getattr(self, f"{name}_size") > 1, doc=doc)


@options
class ParallelismConfig:
    """The number of processes along each parallel dimension, by default from the environment, or else 1."""

    dp_replicate_size: int = becomes("fsdp.strategy", default=None)
    dp_shard_size: int = becomes("fsdp.strategy, fsdp.shard_size", default=None)
    tp_size: int = becomes("parallel.tensor", default=None)
    cp_size: int = becomes("parallel.context", default=None)
    cp_backend: Literal["torch"] = None  # pyright: ignore[reportAssignmentType] filled below
    sp_size: int = becomes("parallel.context", default=None)
    sp_backend: Literal["deepspeed"] = None  # pyright: ignore[reportAssignmentType]
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    device_mesh = None

    def __post_init__(self) -> None:
        """Fill the fields; raise a ValueError for a wrong value, or for values that exclude each other."""
        fill_unsaid(self, _ENV, **{f"{name}_size": 1 for name in _DIMENSIONS})
        fill_unsaid(self, _ENV, cp_backend="torch", sp_backend="deepspeed")
        for name, allowed in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if (given := getattr(self, name)) != allowed:
                raise ValueError(f"{name} must be one of {[allowed]}, but got {given}")
        for name, size in self._sizes.items():
            if not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
                raise ValueError(f"{name}_size={size!r}: must be an integer of at least 1")
        kinds = (TorchTensorParallelConfig, TorchContextParallelConfig, DeepSpeedSequenceParallelConfig)
        for name, handler in zip(("tp", "cp", "sp"), kinds, strict=True):
            if self._sizes[name] > 1 and getattr(self, f"{name}_handler") is None:
                setattr(self, f"{name}_handler", handler())
        if self.cp_size > 1 and self.sp_size > 1:
            raise ValueError(f"cp_size={self.cp_size} and sp_size={self.sp_size} are mutually exclusive")
        if (self.tp_size > 1 or self.cp_size > 1) and self.dp_replicate_size > 1 and self.dp_shard_size == 1:
            raise ValueError(
                f"dp_replicate_size={self.dp_replicate_size} beside tp_size: set dp_shard_size above 1"
            )

    def __repr__(self) -> str:
        lines = [f"{each.name}={getattr(self, each.name)}" for each in fields(self)]
        return "ParallelismConfig(\n\t" + ",\n\t".join([*lines, f"total_size={self.total_size}"]) + ")\n"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: vars(value) if name.endswith("_handler") and value is not None else value
            for name, value in found.items()
        }

    dp_dim_names = _axes(
        "dp_replicate", "dp_shard", doc="The axes along which processes read different samples."
    )
    non_dp_dim_names = _axes("tp", "cp", "sp", doc="The axes along which processes read the same samples.")
    dp_shard_cp_dim_names = _axes("dp_shard", "cp", doc="The axes over which FSDP shards.")
    dp_cp_dim_names = _axes("dp_replicate", "dp_shard", "cp", doc="The axes over which losses are averaged.")
    active_mesh_dims = _axes(
        "dp_replicate", "dp_shard", "tp", "cp", "sp", doc="The axes of several processes."
    )
    total_size = _size(*_DIMENSIONS, doc="The number of processes.")
    non_data_parallel_size = _size(
        "tp", "cp", "sp", doc="The number of processes that read the same samples."
    )
    data_parallel_size = _size("dp_replicate", "dp_shard", doc="The groups that read different samples.")
    dp_replicate_enabled = _is_enabled("dp_replicate", doc="True if the model is replicated.")
    dp_shard_enabled = _is_enabled("dp_shard", doc="True if the model is sharded.")
    tp_enabled = _is_enabled("tp", doc="True if matrices are split.")
    cp_enabled = _is_enabled("cp", doc="True if sequences are split.")
    sp_enabled = _is_enabled("sp", doc="True if sequences are split by heads.")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The mesh axes over which FSDP shards."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return a new mesh, with joint axes for FSDP and for losses; None without axes. Called on all ranks."""
        names = self._enabled(*_DIMENSIONS)
        if not names:
            return None
        mesh = init_device_mesh(
            device_type, tuple(self._sizes[name] for name in names), mesh_dim_names=tuple(names)
        )
        for joint, parts in (
            ("dp", self.dp_dim_names),
            ("dp_shard_cp", self.dp_shard_cp_dim_names),
            ("dp_cp", self.dp_cp_dim_names),
        ):
            if parts:
                flatten_mesh(mesh, parts, joint)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh; the first call makes it. Called on all ranks with the same kind of device."""
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError(
                    "get_device_mesh(device_type=None): name the mesh's kind of device, such as 'cuda'"
                )
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            raise ValueError(
                f"device_type={device_type!r}: the mesh was made for {self.device_mesh.device_type!r}; make a new "
                "ParallelismConfig for another kind of device"
            )
        return self.device_mesh

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: getattr(self, f"{name}_size") for name in _DIMENSIONS}

    def _enabled(self, *names: str) -> list[str]:
        return [name for name in names if self._sizes[name] > 1]


def dimensions_of(
    plugin: TorchTensorParallelPlugin, dimensions: ParallelismConfig | None
) -> ParallelismConfig:
    """Return the dimensions that the older options say; a ValueError refuses them beside others."""
    instead = "say parallelism_config=ParallelismConfig(tp_size=...)"
    if dimensions is not None:
        raise ValueError(f"torch_tp_plugin= beside parallelism_config=: leave it out, and {instead}")
    warnings.warn(f"torch_tp_plugin= is deprecated: {instead}", FutureWarning, stacklevel=7)
    return ParallelismConfig(tp_size=plugin.tp_size)
