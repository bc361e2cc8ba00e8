import subprocess
import sys

import pytest

import drivetrain_data


def test_the_public_names_are_these() -> None:
    assert drivetrain_data.__all__ == [
        "AmbiguousLoaderError",
        "BatchPlan",
        "DataSettings",
        "DataStateError",
        "DispatchError",
        "IndexFunction",
        "IndexRangeError",
        "InvertibleIndexFunction",
        "LoaderTracker",
        "ORDER_VERSION",
        "Partition",
        "Permutation",
        "PermutationSampler",
        "ResumedLoaderError",
        "Shard",
        "ShardedLoader",
        "ShardingStrategy",
        "SkippedBatches",
        "TrimError",
        "UnevenPolicy",
        "UnpreparedLoaderError",
        "UnpreparedLoops",
        "batch_sizes",
        "check_after_loop",
        "is_loader",
        "own_seed",
        "seed_at",
        "shard_loader",
        "skip_first_batches",
        "trim",
        "trim_objects",
    ]


def test_every_public_name_is_there() -> None:
    for name in drivetrain_data.__all__:
        assert getattr(drivetrain_data, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'sharded'"):
        drivetrain_data.sharded  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, drivetrain_data; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
