"""Shard any DataLoader and resume it exactly, even with a different number of processes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_data.active_loaders import LoaderTracker as LoaderTracker
    from drivetrain_data.errors import AmbiguousLoaderError as AmbiguousLoaderError
    from drivetrain_data.errors import DataStateError as DataStateError
    from drivetrain_data.errors import DispatchError as DispatchError
    from drivetrain_data.errors import IndexRangeError as IndexRangeError
    from drivetrain_data.errors import ResumedLoaderError as ResumedLoaderError
    from drivetrain_data.errors import TrimError as TrimError
    from drivetrain_data.errors import UnpreparedLoaderError as UnpreparedLoaderError
    from drivetrain_data.loader import ShardedLoader as ShardedLoader
    from drivetrain_data.loader_seeds import own_seed as own_seed
    from drivetrain_data.loader_seeds import seed_at as seed_at
    from drivetrain_data.randomness.permutation import ORDER_VERSION as ORDER_VERSION
    from drivetrain_data.randomness.permutation import Permutation as Permutation
    from drivetrain_data.remainder import batch_sizes as batch_sizes
    from drivetrain_data.remainder import check_after_loop as check_after_loop
    from drivetrain_data.remainder import trim as trim
    from drivetrain_data.remainder import trim_objects as trim_objects
    from drivetrain_data.sampling.block_shuffle import IndexFunction as IndexFunction
    from drivetrain_data.sampling.block_shuffle import InvertibleIndexFunction as InvertibleIndexFunction
    from drivetrain_data.sampling.partition import Partition as Partition
    from drivetrain_data.sampling.samplers import PermutationSampler as PermutationSampler
    from drivetrain_data.sampling.step_info import BatchPlan as BatchPlan
    from drivetrain_data.settings import DataSettings as DataSettings
    from drivetrain_data.settings import ShardingStrategy as ShardingStrategy
    from drivetrain_data.settings import UnevenPolicy as UnevenPolicy
    from drivetrain_data.shard import Shard as Shard
    from drivetrain_data.sharded_loader import is_loader as is_loader
    from drivetrain_data.sharded_loader import shard_loader as shard_loader
    from drivetrain_data.skipping_view import SkippedBatches as SkippedBatches
    from drivetrain_data.skipping_view import skip_first_batches as skip_first_batches
    from drivetrain_data.unprepared_loops import UnpreparedLoops as UnpreparedLoops

# Module -> its public names.
_NAMES = {
    "active_loaders": "LoaderTracker",
    "errors": "AmbiguousLoaderError DataStateError DispatchError IndexRangeError ResumedLoaderError TrimError "
    "UnpreparedLoaderError",
    "loader": "ShardedLoader",
    "loader_seeds": "own_seed seed_at",
    "randomness.permutation": "ORDER_VERSION Permutation",
    "remainder": "batch_sizes check_after_loop trim trim_objects",
    "sampling.block_shuffle": "IndexFunction InvertibleIndexFunction",
    "sampling.partition": "Partition",
    "sampling.samplers": "PermutationSampler",
    "sampling.step_info": "BatchPlan",
    "settings": "DataSettings ShardingStrategy UnevenPolicy",
    "shard": "Shard",
    "sharded_loader": "is_loader shard_loader",
    "skipping_view": "skip_first_batches SkippedBatches",
    "unprepared_loops": "UnpreparedLoops",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_data.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_data' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
