import functools
import linecache
import pickle
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from drivetrain_launcher import LaunchError
from drivetrain_launcher.run.notebook.pickled_call import pack, pack_result, unpack
from drivetrain_launcher.run.notebook.rank_channel import new_content, view_content


def shipped(function: Any, *args: Any) -> Any:
    pickled_call = pack(function, args)
    with pickled_call.content:
        pickled_call.content.flush()
        function, args = unpack(view_content(pickled_call.content))
    return function(*args)


def test_functions_of_every_kind_arrive_with_what_they_hold_and_their_arguments() -> None:
    class Model:
        def __init__(self, width: int) -> None:
            self.width = width

        def fit(self, more: int) -> int:
            return self.width + more

    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any) -> Any:
            return "logged", function(*args)

        return inner

    held = torch.ones(3)
    assert torch.equal(shipped(lambda more: held + more, torch.ones(3)), torch.full((3,), 2.0))
    assert shipped(Model(3).fit, 4) == 7
    assert shipped(functools.partial(Model(3).fit, 5)) == 8
    assert shipped(logged(Model(3).fit), 1) == ("logged", 4)
    assert shipped(Model, 5).width == 5


def test_an_argument_that_cannot_be_shipped_is_named_by_its_place(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("w") as file,
        pytest.raises(
            LaunchError,
            match=r"argument 1: cannot be sent to each rank \(PicklingError: Cannot pickle files .*\); "
            r"create it inside the function: open files",
        ),
    ):
        pack(print, (1, {"log": file}))


def test_a_function_that_cannot_be_shipped_is_named_with_the_first_line_of_the_error() -> None:
    class Refuses:
        def __reduce__(self) -> str:
            raise RuntimeError("never\nsecond line")

    refusing = Refuses()

    def train() -> object:
        return refusing

    with pytest.raises(
        LaunchError, match=r"^train: cannot be sent to each rank \(RuntimeError: never\); create it"
    ):
        pack(train, (1,))


def test_a_return_value_that_cannot_be_shipped_is_named_with_its_rank() -> None:
    with new_content() as content:
        content.write(b"before")
        with pytest.raises(LaunchError, match=r"the return value of rank 3: .* 'generator' object\)"):
            pack_result({"rest": (number for number in "ab")}, content, rank=3)
        assert content.tell() == len(b"before")


def test_the_source_of_a_function_that_is_in_no_file_goes_with_it() -> None:
    name = "<a cell of the test>"
    source = "def fail():\n    raise ValueError('from the cell')\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), space)
    pickled_call = pack(space["fail"], ())
    linecache.cache.pop(name)
    with pickled_call.content:
        pickled_call.content.flush()
        unpack(view_content(pickled_call.content))
    assert linecache.getline(name, 2) == "    raise ValueError('from the cell')\n"
    linecache.cache.pop(name)


def test_names_of_main_are_those_of_the_ranks_main(tmp_path: Path) -> None:
    # What is pickled by name there, as by gather_object and loaders, is found.
    source = """
import pickle, sys
from drivetrain_launcher.run.notebook.pickled_call import pack
class Config: pass
def train(): return Config()
with open(sys.argv[1], "wb") as file:
    content = pack(train, ()).content
    content.seek(0)
    file.write(content.read())
"""
    file = tmp_path / "pickled_call"
    subprocess.run([sys.executable, "-c", source, str(file)], check=True)
    try:
        function, args = unpack(file.read_bytes())
        assert isinstance(function, FunctionType)
        value = function(*args)
        assert type(pickle.loads(pickle.dumps(value))) is type(value)
    finally:
        for name in ("Config", "train"):
            vars(sys.modules["__main__"]).pop(name, None)


def test_a_large_closure_is_told_with_its_largest_part() -> None:
    table = torch.zeros(30 * 2**20)
    small = torch.zeros(10)

    def train() -> int:
        return len(table) + len(small)

    pickled_call = pack(train, ())
    pickled_call.content.close()
    (note,) = pickled_call.notes
    assert note == (
        "train and what it uses are 125.83 MB, which each rank gets a copy of (closure 'table': 125.83 MB); load "
        "large data inside the function"
    )
    with pack(len, ("small",)).content as content:
        assert content.tell() < 1000
