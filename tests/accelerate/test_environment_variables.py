"""Environment variables, beside the installed Accelerate."""

import os
from typing import Any

import pytest

from drivetrain_accelerate import environment_variables as ours

real: Any = pytest.importorskip("accelerate.utils.environment")


def outcome(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (ValueError, TypeError) as error:
        return type(error).__name__


@pytest.mark.parametrize(
    "word", ["y", "yes", "t", "TRUE", "on", "1", "n", "No", "f", "false", "off", "0", "maybe", ""]
)
def test_words_mean_what_they_mean_in_accelerate(word: str) -> None:
    for to_bool in (False, True):
        theirs = outcome(real.str_to_bool, word, to_bool=to_bool)
        mine = outcome(ours.str_to_bool, word, to_bool=to_bool)
        assert (mine, type(mine)) == (theirs, type(theirs))


def test_variables_are_read_as_accelerate_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"A_1": "3", "A_2": "yes", "A_3": "bad", "A_4": "-5", "A_5": ""}.items():
        monkeypatch.setenv(name, text)
    for keys in (["NOPE", "A_1"], ["NOPE"], ["A_4", "A_1"], ["A_3"], ["A_5"], "A_1"):
        assert outcome(ours.get_int_from_env, keys, 7) == outcome(real.get_int_from_env, keys, 7)
    for name in ("A_1", "A_2", "A_3", "A_5", "NOPE"):
        for default in (False, True):
            mine, theirs = ours.parse_flag_from_env, real.parse_flag_from_env
            assert outcome(mine, name, default) == outcome(theirs, name, default)
            assert ours.parse_choice_from_env(name, default) == real.parse_choice_from_env(name, default)


def test_patches_end_with_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_1", "before")
    for module in (real, ours):
        with module.patch_environment(a_1=9, new_one=None):
            assert (os.environ["A_1"], os.environ["NEW_ONE"]) == ("9", "None")
            os.environ["A_1"] = "changed inside"
        assert os.environ["A_1"] == "before"
        assert "NEW_ONE" not in os.environ
        with module.clear_environment():
            assert not os.environ
            os.environ["INSIDE"] = "1"
        assert os.environ["A_1"] == "before"
        assert "INSIDE" not in os.environ


def test_tests_leave_no_variables_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_X", "0")
    monkeypatch.delenv("OTHER", raising=False)
    for module in (real, ours):

        @module.purge_accelerate_environment
        def change() -> int:
            os.environ.update(ACCELERATE_X="1", ACCELERATE_Y="1", OTHER="1")
            return 5

        assert change() == 5
        assert (os.environ["ACCELERATE_X"], os.environ.pop("OTHER")) == ("0", "1")
        assert "ACCELERATE_Y" not in os.environ

        @module.purge_accelerate_environment
        class Case:
            def setUp(self) -> None:
                os.environ["ACCELERATE_Z"] = "1"

            def test_it(self) -> None:
                os.environ["ACCELERATE_Y"] = "1"

        Case().setUp()
        Case().test_it()
        assert os.environ.pop("ACCELERATE_Z") == "1"
        assert "ACCELERATE_Y" not in os.environ


def test_lines_of_variables_leave_out_what_a_shell_would_read(caplog: pytest.LogCaptureFixture) -> None:
    variables = {"A": "1", "B": "b;c", "C": "x y", "D": "a\nb", "E F": "1", "G": "$x", "H": ""}
    assert ours.convert_dict_to_env_variables(variables) == real.convert_dict_to_env_variables(variables)
    assert "the variable B=b;c is left out" in caplog.text
