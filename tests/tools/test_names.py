from checks.names import classes_twice, files_twice
from checks.sources import parse


def test_a_class_that_stands_twice_is_found() -> None:
    one = parse("packages/a/src/a/x.py", "class Piece: ...\nclass _Own: ...\n")
    other = parse("packages/b/src/b/y.py", "\nclass Piece: ...\nclass _Own: ...\nclass Command: ...\n")
    third = parse("packages/c/src/c/z.py", "class Command: ...\n")
    (finding,) = classes_twice([one, other, third], {"Command": "of two"})
    assert finding.where == "packages/b/src/b/y.py:2"
    assert "a class 'Piece' stands in packages/a/src/a/x.py:1 too" in finding.message


def test_a_file_that_stands_twice_is_found() -> None:
    paths = ["a/carrier.py", "b/carrier.py", "a/errors.py", "b/errors.py", "a/__init__.py", "b/__init__.py"]
    (finding,) = files_twice([parse(path, "") for path in paths], {"errors": "one a package"})
    assert finding.where == "b/carrier.py"


def test_an_exception_that_nothing_needs_any_more_is_found() -> None:
    (finding,) = files_twice([parse("a/errors.py", "")], {"errors": "one a package"})
    assert "a file 'errors' may stand several times (one a package), and does not" in finding.message
