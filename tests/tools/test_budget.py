import pytest

from checks.budget import overdrawn
from checks.sources import parse

DESIGN = """
| distribution | import name | lines at most |
|---|---|---:|
| drivetrain | drivetrain | 3 |
| drivetrain-state | drivetrain_state | 1,002 |
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"state": 1002, "drivetrain": 3}, ""),
        ({"state": 1003}, "1,003 lines, 1 more than its budget"),
        ({"drivetrain": 4}, "4 lines, 1 more than its budget"),
        ({"data": 1}, "no budget of lines for data"),
    ],
)
def test_the_files_of_a_package_are_counted_together(lines: dict[str, int], message: str) -> None:
    rooms = [
        parse(f"packages/{package}/src/x/{name}.py", "x = 1\n" * number)
        for package, total in lines.items()
        for name, number in (("one", total - 1), ("other", 1))
    ]
    assert [message in str(finding) for finding in overdrawn(rooms, DESIGN)] == [True] * bool(message)
