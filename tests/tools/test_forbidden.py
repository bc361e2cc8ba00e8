from collections.abc import Callable

import pytest

from checks.findings import Finding
from checks.forbidden import (
    ENVIRONMENT_DOOR,
    environment_access,
    global_statements,
    module_state,
    swallowed_errors,
    text_marks,
)
from checks.sources import Source, parse

ROOM = "packages/a/src/a/room.py"


def lines(rule: Callable[[Source], list[Finding]], text: str, path: str = ROOM) -> list[int]:
    return [int(finding.where.rpartition(":")[2]) for finding in rule(parse(path, text))]


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "\nfrom os import environ",
        "import os\nos.putenv('A', 'b')",
    ],
)
def test_the_environment_is_touched_in_one_file_alone(text: str) -> None:
    assert lines(environment_access, text) == [2]
    assert lines(environment_access, text, ENVIRONMENT_DOOR) == []


def test_other_uses_of_os_are_fine() -> None:
    assert lines(environment_access, "import os\nos.getpid()\nsettings.environ = 1") == []


@pytest.mark.parametrize("text", ["progress.mark('save')", "progress.note('save')", "mark('save')"])
def test_a_text_as_a_mark_of_progress_is_found(text: str) -> None:
    assert lines(text_marks, text) == [1]


def test_members_and_texts_with_values_are_fine() -> None:
    assert lines(text_marks, "progress.mark(ProgressMark.SAVE)\nprogress.mark(f'read {name}')") == []


def test_a_global_statement_is_found() -> None:
    assert lines(global_statements, "def f():\n    global x\n    x = 1") == [2]
    assert lines(global_statements, "def f():\n    x = 1\n    def g():\n        nonlocal x") == []


@pytest.mark.parametrize(
    "handler",
    [
        "except Exception:\n    pass",
        "except:\n    pass",
        "except BaseException:\n    ...",
        "except (OSError, Exception):\n    pass",
    ],
)
def test_a_swallowed_error_is_found(handler: str) -> None:
    assert lines(swallowed_errors, f"try:\n    f()\n{handler}") == [3]


def test_suppressing_everything_is_found() -> None:
    assert lines(swallowed_errors, "import contextlib\nwith contextlib.suppress(Exception):\n    f()") == [2]
    assert lines(swallowed_errors, "import contextlib\nwith contextlib.suppress(OSError):\n    f()") == []


@pytest.mark.parametrize(
    "handler", ["except OSError:\n    pass", "except Exception as e:\n    raise ValueError from e"]
)
def test_an_expected_or_reraised_error_is_fine(handler: str) -> None:
    assert lines(swallowed_errors, f"try:\n    f()\n{handler}") == []


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}\ndef f(k):\n    cache[k] = 1",
        "_SEEN: set[int] = set()\ndef f(k):\n    _SEEN.add(k)",
        "import collections\nlast = collections.deque()\ndef f():\n    last.append(1)",
        "table = {1: 2}\ndef f():\n    del table[1]",
    ],
)
def test_a_container_of_the_module_that_a_function_changes_is_found(text: str) -> None:
    assert lines(module_state, text) == [len(text.splitlines())]


@pytest.mark.parametrize(
    "text",
    [
        "TABLE = {1: 2}\ndef f(k):\n    return TABLE[k]",
        "found = []\ndef f():\n    found = []\n    found.append(1)",
        "found = []\ndef f(found):\n    found.append(1)",
        "names = [1]\nnames.append(2)",
    ],
)
def test_constants_and_local_containers_are_fine(text: str) -> None:
    assert lines(module_state, text) == []
