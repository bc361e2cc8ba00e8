from dataclasses import replace

import pytest

from checks.backend_branches import backend_branches
from checks.sources import parse
from checks.workspace import Package

PACKAGE = Package(
    name="toys",
    distribution="drivetrain-toys",
    module="drivetrain_toys",
    version="1",
    description="A toy.",
    dependencies=(),
    alone_extras=(),
    backends={"toy": "drivetrain_toys.toy:ToyBackend", "big": "drivetrain_toys.big.engine:BigBackend"},
)


def lines(text: str, path: str = "packages/a/src/a/room.py") -> list[str]:
    return [finding.where for finding in backend_branches([parse(path, text)], [PACKAGE])]


@pytest.mark.parametrize(
    "text",
    [
        "if backend == 'toy': pass",
        "if 'toy' != settings.backend: pass",
        "if name in ('toy', 'other'): pass",
        "isinstance(backend, ToyBackend)",
        "isinstance(backend, (int, toys.ToyBackend))",
        "type(backend) is ToyBackend",
        "type(backend) in (int, ToyBackend)",
        "type(backend).__name__ == 'ToyBackend'",
        "backend.startswith('toy')",
        "{'toy': 1, 'other': 2}[backend]",
    ],
)
def test_a_branch_on_a_name_or_type_is_found(text: str) -> None:
    assert lines(text) == ["packages/a/src/a/room.py:1"]


def test_a_branch_on_types_that_a_tuple_names_is_found() -> None:
    assert lines("KINDS = (int, ToyBackend)\nisinstance(backend, KINDS)") == ["packages/a/src/a/room.py:2"]


def test_a_match_on_a_name_or_type_is_found() -> None:
    assert len(lines("match backend:\n    case 'toy': pass\n    case BigBackend(): pass")) == 2


@pytest.mark.parametrize(
    "text",
    ["if device.type == 'toy': pass", "names = ['toy']", "ToyBackend()", "if backend == 'unknown': pass"],
)
def test_what_is_no_branch_on_a_backend_is_fine(text: str) -> None:
    assert lines(text) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("packages/toys/src/drivetrain_toys/toy.py", "isinstance(backend, ToyBackend)"),
        ("packages/toys/src/drivetrain_toys/big/engine.py", "if name == 'big': pass"),
        ("packages/toys/src/drivetrain_toys/big/wheels.py", "if name == 'big': pass"),
    ],
)
def test_a_backend_may_speak_of_itself(path: str, text: str) -> None:
    assert lines(text, path) == []


def test_the_only_backend_of_a_package_may_speak_of_itself_in_all_of_it() -> None:
    only = replace(PACKAGE, backends={"toy": "drivetrain_toys.toy:ToyBackend"})
    room = parse("packages/toys/src/drivetrain_toys/room.py", "if name == 'toy': pass")
    assert backend_branches([room], [only]) == []
    assert len(backend_branches([room], [PACKAGE])) == 1


def test_a_backend_may_not_speak_of_another() -> None:
    assert lines("isinstance(backend, BigBackend)", "packages/toys/src/drivetrain_toys/toy.py") != []


@pytest.mark.parametrize(
    ("folder", "found"), [("toys/src/drivetrain_toys/big", 0), ("toys/src/drivetrain_toys", 1)]
)
def test_a_type_test_for_prepared_models_belongs_into_their_folder(folder: str, found: int) -> None:
    model = parse("packages/toys/src/drivetrain_toys/big/prepared.py", "class BigPrepared(Prepared): ...")
    other = parse(
        f"packages/{folder}/room.py", "isinstance(model, Prepared) or isinstance(model, BigPrepared)"
    )
    findings = backend_branches([model, other], [PACKAGE])
    assert ["branches on BigPrepared" in finding.message for finding in findings] == [True] * found
