import pytest

from checks.budget import overdrawn
from checks.sources import parse

DESIGN = """
| distribution | import name | lines at most |
|---|---|---:|
| drivetrain | drivetrain | 3 |
| drivetrain-state | drivetrain_state | 1,002 |
{other}
all packages have at most 1,006 lines, and none more than 1,002
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
    found = overdrawn(rooms, DESIGN.format(other=""))
    assert [message in str(finding) for finding in found] == [True] * bool(message)


@pytest.mark.parametrize(
    ("lines", "message"),
    [(2, "1,007 lines, 1 more than in docs/design.md"), (1, "the budget of data is above 1,002 lines")],
)
def test_all_packages_have_a_limit_together_and_each_of_them(lines: int, message: str) -> None:
    design = DESIGN.format(other=f"| drivetrain-data | drivetrain_data | {1_001 + lines % 2 * 2:,} |")
    numbers = {"state": 1002, "drivetrain": 3, "data": lines}
    files = [parse(f"packages/{name}/src/x/y.py", "x = 1\n" * number) for name, number in numbers.items()]
    assert [message in str(finding) for finding in overdrawn(files, design)] == [True]


def test_a_page_without_limits_is_found() -> None:
    (finding,) = overdrawn([], "| drivetrain | drivetrain | 3 |")
    assert "no limits of lines" in str(finding)
