import json
import re
from dataclasses import replace

import pytest

from drivetrain_lint.checker import Report, check_document
from drivetrain_lint.finding import Finding, Severity
from drivetrain_lint.reading.documents import parse_document
from drivetrain_lint.reporters import as_github, as_json, as_sarif, as_text
from drivetrain_lint.rules.registry import choose_rules
from lint.linting import ACCELERATOR, findings

SOURCE = ACCELERATOR + "if accelerator.is_main_process:\n\taccelerator.gather(x)\n"


def report(*found: Finding) -> Report:
    return Report(findings=found or tuple(findings(SOURCE)), num_files=1, rules=choose_rules())


def broken() -> Finding:
    return check_document(parse_document("x = (\n", shown="dir/a, b:c.py"), rules=choose_rules())[0]


def in_cell() -> Finding:
    (found,) = findings(SOURCE)
    return replace(found, cell=3)


def test_text_shows_the_line_and_a_mark_below_the_fault() -> None:
    shown = as_text(report()).splitlines()
    assert shown[0] == "train.py:4:2 error DT101 collective-on-some-ranks"
    assert " ".join(shown[1:3]).endswith("(line 3) lets   in")
    assert shown[3:6] == ["    |", "  4 |     accelerator.gather(x)", "    |     ^^^^^^^^^^^^^^^^^^^^^"]
    assert shown[6].startswith("  why     The ranks that call it wait")
    assert shown[7].startswith("  repair  Call it on all ranks")
    assert shown[-1] == "1 file, 1 error"


def test_text_is_coloured_for_a_terminal_alone_and_says_the_same() -> None:
    plain, coloured = as_text(report()), as_text(report(), is_coloured=True)
    assert "\x1b" not in plain
    assert "\x1b[1;31merror\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_text_keeps_to_the_width_of_the_terminal() -> None:
    assert max(map(len, as_text(report(), width=60).splitlines())) <= 60


def test_text_says_that_nothing_was_found() -> None:
    assert as_text(Report(findings=(), num_files=2, rules=())) == "2 files, nothing found\n"


def test_json_holds_every_field() -> None:
    content = json.loads(as_json(report()))
    assert content["counts"] == {"error": 1}
    assert content["findings"][0]["line"] == 4
    assert set(content["findings"][0]) == set(Finding.__slots__)


def test_github_annotates_the_line_and_escapes_what_would_end_a_field() -> None:
    line = as_github(report(broken())).splitlines()[0]
    assert line.startswith("::error file=dir/a%2C b%3Ac.py,line=1,col=")
    assert ",title=DT001 unreadable::The file does not parse" in line
    assert as_github(report()).startswith(
        "::error file=train.py,line=4,col=2,endColumn=23,title=DT101 collective-on-some-ranks::"
    )


def test_github_names_the_cell_of_a_notebook_in_the_title() -> None:
    assert as_github(report(in_cell())).startswith(
        "::error file=train.py,title=DT101 collective-on-some-ranks (cell 3)::"
    )


def test_a_warning_is_one_in_every_output() -> None:
    (found,) = findings(SOURCE)
    warning = replace(found, severity=Severity.WARNING)
    assert as_github(report(warning)).startswith("::warning ")
    assert json.loads(as_sarif(report(warning)))["runs"][0]["results"][0]["level"] == "warning"


def unknown_names(value: object) -> set[str]:
    """Return the names in a parsed SARIF log that the format does not have."""
    if isinstance(value, list):
        return set[str]().union(*map(unknown_names, value))
    extra = getattr(value, "model_extra", None)
    return set() if extra is None else set(extra).union(*map(unknown_names, vars(value).values()))


def test_sarif_has_the_shape_of_version_2_1_0() -> None:
    sarif = pytest.importorskip("sarif_pydantic", reason="comes with the dev dependencies")
    log = json.loads(as_sarif(report(*findings(SOURCE), broken(), in_cell())))
    (run,) = log["runs"]
    driver, results = run["tool"]["driver"], run["results"]
    assert log["version"] == "2.1.0"
    # The models lack columnKind, which the standard has.
    assert unknown_names(sarif.Sarif.model_validate(log)) <= {"columnKind"}
    assert run["columnKind"] == "unicodeCodePoints"
    assert all(re.fullmatch("[A-Z][A-Za-z]+", rule["name"]) for rule in driver["rules"])
    assert all(result["message"]["text"] for result in results)
    assert [driver["rules"][each["ruleIndex"]]["id"] for each in results] == [
        each["ruleId"] for each in results
    ]
    first, unreadable, cell = (each["locations"][0]["physicalLocation"] for each in results)
    assert [first["region"][name] for name in ("startLine", "startColumn", "endColumn")] == [4, 2, 23]
    assert unreadable["artifactLocation"]["uri"] == "dir/a%2C%20b%3Ac.py"
    assert "region" not in cell
    assert "(cell 3, line 4)" in results[2]["message"]["text"]
