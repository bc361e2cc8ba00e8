import re
from pathlib import Path

import pytest

from drivetrain_lint.checker import UNREADABLE
from drivetrain_lint.errors import LintArgumentError
from drivetrain_lint.rules.registry import ALL_RULES, choose_rules

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "lint.md"


def test_codes_and_names_are_unique_and_well_formed() -> None:
    assert len({rule.code for rule in ALL_RULES}) == len({rule.name for rule in ALL_RULES}) == len(ALL_RULES)
    assert all(re.fullmatch(r"DT[1-5]\d\d", rule.code) for rule in ALL_RULES)


def test_all_rules_are_checked_by_default() -> None:
    assert choose_rules() == choose_rules(select=("all",)) == ALL_RULES


def test_rules_are_chosen_by_codes_their_beginnings_and_names() -> None:
    assert {rule.code[:3] for rule in choose_rules(select=("DT1", "dt3"))} == {"DT1", "DT3"}
    assert [rule.code for rule in choose_rules(select=("hard-coded-device",))] == ["DT401"]
    assert "DT101" not in {rule.code for rule in choose_rules(ignore=("DT101",))}
    chosen = [rule.code for rule in choose_rules(select=("DT30",), ignore=("DT301", "DT302"))]
    assert chosen == ["DT303", "DT304", "DT305", "DT306"]


@pytest.mark.parametrize("word", ["DT999", "hard-coded-devices", "X"])
def test_an_unknown_rule_is_refused(word: str) -> None:
    with pytest.raises(LintArgumentError, match=f"^{word}: no such rule; .*the rules are DT101, DT102"):
        choose_rules(select=(word,))
    with pytest.raises(LintArgumentError, match="no such rule"):
        choose_rules(ignore=(word,))


def test_the_page_has_every_text_of_each_rule() -> None:
    rows = [
        row.strip("| ").split(" | ") for row in re.findall(r"^\| DT\d{3} .*$", PAGE.read_text(), re.MULTILINE)
    ]
    assert rows == [
        [f"{rule.code} `{rule.name}`", rule.severity.value, rule.summary, rule.why, rule.repair]
        for rule in (UNREADABLE, *ALL_RULES)
    ]
