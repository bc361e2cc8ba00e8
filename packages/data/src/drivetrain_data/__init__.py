"""Shard any DataLoader, and resume it exactly, also with another number of processes.

`shard_loader` takes a DataLoader and a `Shard(index, count)` and knows nothing else: no launcher, no environment, no
global state. The order of an epoch is a function of seed and epoch alone, and a position in it a handful of integers.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_data.active import ActiveLoaders as ActiveLoaders
    from drivetrain_data.errors import AmbiguousLoaderError as AmbiguousLoaderError
    from drivetrain_data.errors import DataError as DataError
    from drivetrain_data.errors import ResumeError as ResumeError
    from drivetrain_data.loader import ShardedLoader as ShardedLoader
    from drivetrain_data.loader import SkippedLoader as SkippedLoader
    from drivetrain_data.loader import skip_first_batches as skip_first_batches
    from drivetrain_data.partition import BatchPlan as BatchPlan
    from drivetrain_data.partition import Partition as Partition
    from drivetrain_data.permutation import Permutation as Permutation
    from drivetrain_data.settings import DataSettings as DataSettings
    from drivetrain_data.shard import Shard as Shard
    from drivetrain_data.sharding import shard_loader as shard_loader
    from drivetrain_data.trimming import trim as trim
    from drivetrain_data.trimming import trim_objects as trim_objects

_ROOMS = {
    "ActiveLoaders": "active",
    "AmbiguousLoaderError": "errors",
    "BatchPlan": "partition",
    "DataError": "errors",
    "DataSettings": "settings",
    "Partition": "partition",
    "Permutation": "permutation",
    "ResumeError": "errors",
    "Shard": "shard",
    "ShardedLoader": "loader",
    "SkippedLoader": "loader",
    "shard_loader": "sharding",
    "skip_first_batches": "loader",
    "trim": "trimming",
    "trim_objects": "trimming",
}
__all__ = [
    "ActiveLoaders",
    "AmbiguousLoaderError",
    "BatchPlan",
    "DataError",
    "DataSettings",
    "Partition",
    "Permutation",
    "ResumeError",
    "Shard",
    "ShardedLoader",
    "SkippedLoader",
    "shard_loader",
    "skip_first_batches",
    "trim",
    "trim_objects",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        from importlib import import_module

        return getattr(import_module(f"drivetrain_data.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'drivetrain_data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
