import functools
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher.run.notebook.unshippable import Named, find_culprit

LOCK = threading.Lock()


class Loader:
    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


@dataclass
class Config:
    name: str = "run"
    extras: dict[str, Any] = field(default_factory=dict)


def path_in(value: Any, label: str = "train") -> str | None:
    culprit = find_culprit(Named(label=label, value=value), cloudpickle.dumps)
    return None if culprit is None else culprit.path


def test_what_can_be_pickled_has_no_culprit() -> None:
    assert path_in(lambda: Config()) is None


def test_a_closure_is_followed_to_the_smallest_part() -> None:
    loader = Loader(LOCK)

    def train() -> object:
        return loader

    assert path_in(train) == "train -> closure 'loader' -> ._iterator -> _thread.lock"


def test_globals_that_are_used_are_followed_those_of_nested_functions_too() -> None:
    space: dict[str, Any] = {"LOCK": LOCK, "unused": LOCK, "__name__": "__main__"}
    exec("def train():\n  def inner(): return LOCK\n  return inner", space)
    assert path_in(space["train"]) == "train -> global 'LOCK' -> _thread.lock"


def test_defaults_are_followed() -> None:
    def train(first: Any = LOCK) -> None:
        del first

    def evaluate(*, key: Any = LOCK) -> None:
        del key

    assert path_in(train) == "train -> default 0 -> _thread.lock"
    assert path_in(evaluate) == "train -> default of 'key' -> _thread.lock"


def test_attributes_of_a_function_such_as_what_a_decorator_wraps_are_followed() -> None:
    def wrapped() -> object:
        return LOCK_CELL

    LOCK_CELL = LOCK  # noqa: N806

    @functools.wraps(wrapped)
    def train() -> None:
        pass

    assert path_in(train) == "train -> .__wrapped__ -> closure 'LOCK_CELL' -> _thread.lock"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, "train -> _thread.lock"),
        (functools.partial(print, 1, LOCK), "train -> argument 1 -> _thread.lock"),
        (functools.partial(print, end=LOCK), "train -> argument 'end' -> _thread.lock"),
        (Loader(LOCK).__init__, "train -> self -> ._iterator -> _thread.lock"),
        ({"a": [1, (2, LOCK)]}, "train -> ['a'] -> [1] -> [1] -> _thread.lock"),
        (Slotted(LOCK), "train -> .held -> _thread.lock"),
        (Config(extras={"lock": LOCK}), "train -> .extras -> ['lock'] -> _thread.lock"),
        ((number for number in "ab"), "train -> generator"),
        (Loader(iter(torch.utils.data.DataLoader([1, 2]))), None),
    ],
)
def test_containers_and_attributes_are_followed(value: Any, path: str | None) -> None:
    found = path_in(value)
    if path is None:
        assert found is not None
        assert found.startswith("train -> ._iterator -> ")
    else:
        assert found == path


def test_a_class_of_a_cell_is_followed() -> None:
    kind = type("Local", (), {"lock": LOCK, "__module__": "__main__"})
    assert path_in(kind) == "train -> .lock -> _thread.lock"


def test_a_cycle_ends() -> None:
    value = Loader(None)
    value._iterator = {"self": value, "lock": LOCK}
    assert path_in(value) == "train -> ._iterator -> ['lock'] -> _thread.lock"


def test_an_object_that_refuses_by_itself_is_named_with_its_reason() -> None:
    class Refuses:
        def __reduce__(self) -> str:
            raise RuntimeError("never\nsecond line")

    culprit = find_culprit(Named(label="train", value=[Refuses()]), cloudpickle.dumps)
    assert culprit is not None
    assert culprit.reason == "RuntimeError: never"
    assert culprit.path.endswith("Refuses")


def test_an_open_file_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        culprit = find_culprit(Named(label="train", value=file), cloudpickle.dumps)
    assert culprit is not None
    assert culprit.remedy == "open the file inside the function, from its path"


values = st.recursive(
    st.none() | st.integers() | st.just(LOCK),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(values)
def test_the_path_leads_to_a_lock_wherever_there_is_one(value: Any) -> None:
    found = path_in(value)
    if found is None:
        cloudpickle.dumps(value)
        return
    steps = found.split(" -> ")
    for step in steps[1:-1]:
        value = eval(f"value{step}")
    assert (value, steps[-1]) == (LOCK, "_thread.lock")
