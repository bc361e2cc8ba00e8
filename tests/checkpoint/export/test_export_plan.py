import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_checkpoint import StateError, TensorInfo, plan_export
from drivetrain_checkpoint.export.shard_size import parse_shard_size

infos = st.builds(
    lambda shape, dtype: TensorInfo(shape=tuple(shape), dtype=dtype),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.int64]),
)
models = st.dictionaries(st.text(min_size=1, max_size=4), infos, max_size=12)


@settings(max_examples=12)  # to draw a model takes 0.1 s
@given(models, st.integers(1, 400))
def test_every_tensor_is_in_one_file_in_order_and_no_file_is_above_the_limit_but_for_one_tensor(
    tensors: dict[str, TensorInfo], limit: int
) -> None:
    plan = plan_export(tensors, max_shard_size=limit)
    assert [name for names in plan.files.values() for name in names] == list(tensors)
    assert plan.weight_map.keys() == plan.tensors.keys() == tensors.keys()
    assert plan.total_size == sum(info.size_bytes for info in tensors.values())
    sizes = [[tensors[name].size_bytes for name in names] for names in plan.files.values()]
    assert all(sum(of_file) <= limit or len(of_file) == 1 for of_file in sizes)
    # No file is closed while the next tensor had room in it.
    assert all(sum(one) + other[0] > limit for one, other in pairwise(sizes))
    count = len(plan.files)
    expected = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert list(plan.files) == (expected if plan.is_sharded else ["model.safetensors"])


def vector(length: int) -> TensorInfo:
    return TensorInfo(shape=(length,), dtype=torch.uint8)


def test_a_tensor_above_the_limit_has_a_file_of_its_own() -> None:
    plan = plan_export(
        {"a": vector(2), "large": vector(11), "none": vector(0), "b": vector(9), "c": vector(1)},
        max_shard_size=10,
    )
    assert list(plan.files.values()) == [("a",), ("large",), ("none", "b", "c")]


def test_a_model_without_tensors_is_one_empty_file() -> None:
    assert plan_export({}).files == {"model.safetensors": ()}


def test_a_tied_name_takes_no_room() -> None:
    plan = plan_export({"a": vector(6), "b": vector(6), "c": vector(4)}, ties={"b": "a"}, max_shard_size=10)
    assert plan.files == {"model.safetensors": ("a", "c")}
    assert plan.total_size == 10
    assert plan.ties == {"b": "a"}


@pytest.mark.parametrize("ties", [{"b": "x"}, {"x": "a"}, {"a": "a"}, {"a": "b", "b": "a"}, {"c": "a"}])
def test_a_tie_of_no_tensor_or_of_another_shape_is_refused(ties: dict[str, str]) -> None:
    with pytest.raises(StateError, match=r"ties\['"):
        plan_export({"a": vector(6), "b": vector(6), "c": vector(4)}, ties=ties)


@pytest.mark.parametrize(
    ("size", "size_bytes"), [(1, 1), ("5GB", 5 * 10**9), ("512MiB", 512 * 2**20), ("1.5 kb", 1500)]
)
def test_the_size_of_a_shard_is_bytes_or_has_a_unit(size: int | str, size_bytes: int) -> None:
    assert parse_shard_size(size) == size_bytes


@pytest.mark.parametrize(
    "size", [0, -1, 1.5, True, None, "", "5", "GB", "0GB", "0.1B", "5XB", "-5GB", "5 G B"]
)
def test_what_is_no_size_is_refused_with_the_units(size: object) -> None:
    with pytest.raises(
        ValueError, match=rf"max_shard_size={re.escape(repr(size))}: .* '512MiB' \(units: B, KB"
    ):
        parse_shard_size(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"x": torch.zeros(1, dtype=torch.complex128)}, "'x' is of torch.complex128"),
        ({"x": 3}, "'x' is of type int; an export holds tensors only"),
        ({3: torch.zeros(1)}, "the name 3: must be a string"),
        ({"__metadata__": torch.zeros(1)}, "the name '__metadata__'"),
    ],
)
def test_what_the_format_cannot_hold_is_named(tensors: dict, said: str) -> None:
    with pytest.raises(StateError, match=re.escape(said)):
        plan_export(tensors)
