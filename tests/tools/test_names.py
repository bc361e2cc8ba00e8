from checks.names import classes_twice
from checks.sources import parse


def test_a_class_that_stands_twice_is_found() -> None:
    one = parse("packages/a/src/a/x.py", "class Piece: ...\nclass _Own: ...\n")
    other = parse("packages/b/src/b/y.py", "\nclass Piece: ...\nclass _Own: ...\nclass Command: ...\n")
    third = parse("packages/c/src/c/z.py", "class Command: ...\n")
    (finding,) = classes_twice([one, other, third], {"Command": "of two"})
    assert finding.where == "packages/b/src/b/y.py:2"
    assert "a class 'Piece' stands in packages/a/src/a/x.py:1 too" in finding.message


def test_an_exception_that_nothing_needs_any_more_is_found() -> None:
    (finding,) = classes_twice([parse("a/errors.py", "class Piece: ...\n")], {"Piece": "of two"})
    assert "a class 'Piece' may stand several times (of two), and does not" in finding.message
