import pytest

from checks.circles import circles
from checks.sources import parse

TOP = "packages/toy/src/toy"


def found(**rooms: str) -> list[str]:
    sources = [parse(f"{TOP}/{name.replace('__', '/')}.py", text) for name, text in rooms.items()]
    return [str(finding) for finding in circles(sources)]


@pytest.mark.parametrize(
    ("rooms", "where"),
    [
        ({"a": "import toy.b", "b": "from toy import c", "c": "import toy.a"}, "toy:"),
        ({"a": "from toy.b import X", "b": "def f():\n    from toy.a import Y"}, "toy:"),
        ({"a": "if TYPE_CHECKING:\n    from toy.b import X", "b": "import toy.a"}, "toy:"),
        ({"x__a": "import toy.x.b", "x__b": "import toy.x.a"}, "toy.x:"),
        ({"x__a": "import toy.y.a", "y__b": "import toy.x.b", "y__a": "", "x__b": ""}, "toy:"),
    ],
)
def test_a_circle_is_found_in_the_folder_that_holds_it(rooms: dict[str, str], where: str) -> None:
    [finding] = found(**rooms)
    assert finding.startswith(where)
    assert "a circle of imports" in finding


def test_arrows_of_one_direction_are_no_circle() -> None:
    assert found(a="import toy.b\nimport toy.x.c", b="import torch", x__c="from toy.b import X") == []
