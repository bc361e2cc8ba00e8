import json
import math
from collections import Counter, OrderedDict, deque, namedtuple
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.saves import save
from drivetrain_checkpoint import Checkpointer, CheckpointSettings, PickleNotAllowedError
from drivetrain_checkpoint.errors import CorruptCheckpointError, StateError
from drivetrain_checkpoint.format.state_tree import decode, encode
from drivetrain_state import Context


def round_trip(state: object) -> object:
    encoded = encode(state, root="state")
    return decode(json.loads(json.dumps(encoded.json, allow_nan=False)), encoded.tensors)


keys = st.one_of(
    st.text(), st.integers(), st.booleans(), st.none(), st.binary(max_size=4), st.tuples(st.integers())
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**300), max_value=2**300),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(max_size=8),
    st.sampled_from([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])]),
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tuple", "$dict", "a", ""]), inner, max_size=3),
    ),
    max_leaves=20,
)


def same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        assert isinstance(right, dict)
        return list(left) == list(right) and all(
            type(a) is type(b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)) and not isinstance(left, torch.Size):
        assert isinstance(right, (list, tuple))
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


@given(states)
def test_plain_states_round_trip_with_types_keys_and_order(state: object) -> None:
    assert same(round_trip(state), state)


@given(st.floats())
def test_every_float_round_trips_and_the_json_is_strict(value: float) -> None:
    back = round_trip(value)
    assert isinstance(back, float)
    assert repr(back) == repr(value)
    assert math.copysign(1, back) == math.copysign(1, value) or math.isnan(value)


@pytest.mark.parametrize(
    "state",
    [
        {1, 2, 3},
        frozenset({"a", "b"}),
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({5: 2, 7: 1}),
        deque([1, 2], maxlen=3),
        bytearray(b"xy"),
    ],
)
def test_standard_containers_keep_their_type(state: object) -> None:
    back = round_trip(state)
    assert type(back) is type(state)
    assert back == state
    assert getattr(back, "maxlen", None) == getattr(state, "maxlen", None)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.arange(6)[::2],
        np.zeros((0, 3), dtype=np.float16),
        np.array(2.5),
        np.array([True, False]),
        np.array(["ab", "c"]),
        np.array([1, 2], dtype=">i4"),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.frombuffer(b"read-only", dtype=np.uint8),
    ],
)
def test_arrays_keep_dtype_shape_and_values(array: np.ndarray) -> None:
    back = round_trip(array)
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "scalar",
    [np.float32(0.1), np.int64(-1), np.bool_(True), np.float64("nan"), np.str_("ab"), np.complex64(1j)],
)
def test_numpy_scalars_keep_their_type(scalar: np.generic) -> None:
    back = round_trip({"value": [scalar]})
    assert isinstance(back, dict)
    assert type(back["value"][0]) is type(scalar)
    np.testing.assert_equal(back["value"][0], scalar)


def test_tensors_are_named_by_their_path() -> None:
    encoded = encode({"optimizer": {"state": {0: {"step": torch.tensor(1)}}}}, root="state")
    assert list(encoded.tensors) == ["optimizer/state/0/step"]


def test_names_do_not_collide() -> None:
    state = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "__metadata__": torch.tensor(3)}
    back = round_trip(state)
    assert isinstance(back, dict)
    assert (back["a/b"], back["a"]["b"], back["__metadata__"]) == (1, 2, 3)
    assert "__metadata__" not in encode(state, root="state").tensors


def test_one_memory_is_stored_once_and_comes_back_as_one_tensor() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2))
    state = {"embed": weight, "head": weight.detach(), "transposed": weight.t(), "part": weight[0]}
    encoded = encode(state, root="state")
    assert list(encoded.tensors) == ["embed", "transposed", "part"]
    back = decode(encoded.json, encoded.tensors)
    assert back["embed"] is back["head"]
    assert back["part"] is not back["embed"]


def test_tensors_without_elements_are_not_taken_for_one() -> None:
    back = round_trip([torch.empty(0, 2), torch.empty(3, 0)])
    assert isinstance(back, list)
    assert [tensor.shape for tensor in back] == [(0, 2), (3, 0)]


class Colour(Enum):
    RED = 1


Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (Colour.RED, "Colour"),
        (Pair(1, 2), "Pair"),
        (lambda: 1, "function"),
        (Path("x"), "PosixPath"),
        (torch.Generator(), "Generator"),
        (np.ma.masked_array([1, 2]), "MaskedArray"),
    ],
)
def test_what_needs_code_to_come_back_is_refused_with_path_type_and_hint(
    value: object, type_name: str
) -> None:
    message = rf"^replicated\['training'\]\[3\]\[0\]: it is a .*{type_name}.*plain values"
    with pytest.raises(StateError, match=message):
        encode({"training": {3: [value]}}, root="replicated")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_plain_data_are_refused() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for value, why in (
        (torch.empty(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.ones(1, dtype=torch.complex128), "complex128"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "NestedTensor|layout"),
        (freed, "memory was freed"),
    ):
        with pytest.raises(StateError, match=rf"^state\['x'\]: .*{why}"):
            encode({"x": value}, root="state")


def test_arrays_of_objects_and_records_are_refused() -> None:
    for value in (np.array([object()]), np.zeros(1, dtype=[("a", int)])):
        with pytest.raises(StateError, match=r"^state\[0\]: it is a NumPy value of dtype"):
            encode([value], root="state")


def test_a_key_that_is_no_plain_value_is_refused() -> None:
    with pytest.raises(StateError, match=r"^state\['x'\]: its key <Colour.RED: 1> is a .*Colour"):
        encode({"x": {Colour.RED: 1}}, root="state")


def test_a_state_that_holds_itself_is_refused() -> None:
    state: list[object] = []
    state.append(state)
    with pytest.raises(StateError, match="holds itself"):
        encode(state, root="state")


@pytest.mark.parametrize(
    ("tagged", "said"),
    [({"$quaternion": [1, 2, 3, 4]}, r"\$quaternion.*upgrade"), ({"$tensor": "weight"}, "'weight'")],
    ids=["tag of a newer version", "missing tensor"],
)
def test_what_cannot_be_decoded_is_named(tagged: dict, said: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=said):
        decode(tagged, {})


def test_optimizer_and_scheduler_states_round_trip() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    ]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for one in (optimizer, *schedulers):
        state = one.state_dict()
        back = round_trip(state)
        assert repr(back) == repr(state)


class Odd:
    """Nothing that JSON or a tensor could express."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


def test_a_pickle_needs_both_sides_to_allow_it(tmp_path: Path, context: Context) -> None:
    allowed = Checkpointer(context, tmp_path, settings=CheckpointSettings(allow_pickle=True))
    state = {"mine": {"odd": [1, Odd()], "weight": torch.ones(2)}}
    with pytest.raises(StateError, match=r"replicated\['mine'\]\['odd'\]\[1\]: it is a .*Odd"):
        save(Checkpointer(context, tmp_path), 1, replicated=state)
    save(allowed, 1, replicated=state)
    loaded = allowed.load().replicated["mine"]
    assert loaded["odd"] == [1, Odd()]
    assert torch.equal(loaded["weight"], torch.ones(2))
    with pytest.raises(PickleNotAllowedError, match=r"mine/odd is a pickle: .*allow_pickle=True"):
        Checkpointer(context, tmp_path).load()


def test_what_cannot_even_be_pickled_is_named() -> None:
    with pytest.raises(StateError, match=r"state\['f'\]: it is a function, which cannot be pickled"):
        encode({"f": lambda: None}, root="state", allow_pickle=True)
