import json
from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_tracking import ValueNotLoggableError, plain_config, plain_values
from drivetrain_tracking.values.secret_masking import mask_config

leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
trees = st.dictionaries(
    st.text(),
    st.recursive(
        leaves, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)), max_leaves=8
    ),
    max_size=4,
)


@given(trees)
def test_plain_values_stay_as_they_are(values: dict[str, object]) -> None:
    assert plain_values(values) == values


@given(trees.filter(lambda tree: mask_config(tree) == tree))
def test_a_plain_configuration_without_secrets_stays_as_it_is(values: dict[str, object]) -> None:
    assert plain_config(values) == values


class Scalar:
    """What a tensor or NumPy scalar shows of itself."""

    def __init__(self, value: float, shape: tuple[int, ...] = ()) -> None:
        self._value, self.shape = value, shape

    def item(self) -> float:
        return self._value


class Phase(IntEnum):
    WARM_UP = 1


def test_values_of_shape_nothing_become_numbers() -> None:
    assert plain_values({"loss": Scalar(0.5), "by": {"head": [Scalar(1), (2, 3)]}}) == {
        "loss": 0.5,
        "by": {"head": [1, [2, 3]]},
    }


def test_real_tensors_and_arrays_of_shape_nothing_become_numbers() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed beside this package")
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed beside this package")
    values = {
        "bf16": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
        "count": torch.tensor(3),
        "float32": numpy.float32(0.25),
        "flag": numpy.bool_(True),
        "array": numpy.array(2.0),
    }
    plain = plain_values(values)
    assert plain == {"bf16": 0.5, "count": 3, "float32": 0.25, "flag": True, "array": 2.0}
    assert json.dumps(plain)


def test_enumerators_that_are_numbers_are_numbers() -> None:
    plain = plain_values({"phase": Phase.WARM_UP})
    assert plain == {"phase": 1}
    assert type(plain["phase"]) is int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Scalar(1, (2,)), r"^values\['a'\]\['b'\]\[0\]: this .*Scalar has shape \(2,\): log .mean\(\)"),
        (object(), r"^values\['a'\]\['b'\]\[0\]: this object cannot be logged"),
        ({1: 2}, r"^values\['a'\]\['b'\]\[0\]\[1\]: this int is no name"),
        (Path("x"), r"^values\['a'\]\['b'\]\[0\]: this pathlib.PosixPath"),
    ],
)
def test_other_values_are_refused_with_path_and_type(value: object, message: str) -> None:
    with pytest.raises(ValueNotLoggableError, match=message):
        plain_values({"a": {"b": [value]}})


class Mode(Enum):
    FAST = "fast"


@dataclass(frozen=True)
class Width:
    hidden: int


@dataclass(frozen=True)
class Model:
    width: Width
    mode: Mode
    data: Path


def test_a_configuration_may_hold_dataclasses_enumerators_and_paths() -> None:
    config = {"model": Model(Width(8), Mode.FAST, Path("data/x")), "more": MappingProxyType({"lr": (1, 2)})}
    assert plain_config(config) == {
        "model": {"width": {"hidden": 8}, "mode": "fast", "data": "data/x"},
        "more": {"lr": [1, 2]},
    }


def test_any_object_of_a_configuration_is_told_in_words() -> None:
    torch = pytest.importorskip("torch")

    @dataclass
    class Login:
        user: str
        key: str = field(metadata={"secret": True})

    config = Namespace(
        f=print, dtype=torch.bfloat16, seed=Scalar(3), login=Login("me", "1234"), tags={"b", "a"}
    )
    assert plain_config(config) == {
        "f": "print",
        "dtype": "torch.bfloat16",
        "seed": 3,
        "login": {"user": "me", "key": "***"},
        "tags": ["a", "b"],
    }


def test_configurations_of_libraries_are_opened() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8)
    assert plain_config({"model": config})["model"]["hidden_size"] == 8
    assert plain_config(config)["model_type"] == "bert"


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ValueNotLoggableError, match=r"^config=3: allowed are a mapping, a dataclass"):
        plain_config(3)


def test_keys_with_one_text_stay_two_values(caplog: pytest.LogCaptureFixture) -> None:
    config = {"layers": {1: "a", "1": "b", 2: "c"}, None: "d"}
    shown = plain_config(config)
    assert shown == {"layers": {"1-53573a19": "a", "1": "b", "2": "c"}, "None": "d"}
    assert plain_config({"1": "b", 1: "a"}) == {"1-53573a19": "a", "1": "b"}, "whatever comes first"
    assert plain_config(shown) == shown, "a resumed run and a replay have the same names"
    assert (
        caplog.messages
        == ["keys of a configuration that have one text are shown apart: 1 as '1-53573a19'"] * 2
    )


def test_keys_that_have_one_text_and_one_type_stay_two_values() -> None:
    class Named:
        def __str__(self) -> str:
            return "x"

    assert sorted(map(str, plain_config({Named(): 1, Named(): 2, Named(): 3}).values())) == ["1", "2", "3"]
