import pytest

from check import CHECKS, Outcome, choose, main, report
from checks.findings import Finding

PACKAGES = ("state", "data")


def names(*words: str) -> list[str]:
    return [check.name for check in choose(words, known_packages=PACKAGES)]


def test_without_a_name_the_fast_checks_run() -> None:
    assert names() == ["style", "types", "floors", "sizes", "english", "names", "docs"]


def test_named_checks_run_in_one_order() -> None:
    assert names("sizes", "style") == ["style", "sizes"]


def test_alone_takes_packages() -> None:
    assert names("alone", "state") == ["alone"]


def test_versions_takes_versions() -> None:
    assert names("versions", "2.11", "3.12") == ["versions"]


def test_alone_and_versions_take_what_the_commit_draws() -> None:
    assert names("alone", "drawn") == ["alone"]
    assert names("alone", "versions", "drawn") == ["alone", "versions"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lnit",), "'lnit' is no check; there are style, types"),
        (("state",), "'state' is a package, which only `alone` takes"),
        (("alone", "2.11"), "'2.11' is a version, which only `versions` takes"),
        (("drawn",), "'drawn' is a version, which only `versions` takes"),
    ],
)
def test_other_words_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(words, known_packages=PACKAGES)


def test_the_report_shows_findings_and_one_table() -> None:
    found = Finding(where="a.py:1", message="too long")
    text = report(
        [
            Outcome(check=CHECKS[0], findings=(), seconds=0.51),
            Outcome(check=CHECKS[1], findings=(found,), seconds=12.0),
        ]
    )
    assert text.splitlines() == [
        "",
        "types",
        "  a.py:1: too long",
        "",
        "check    result          seconds",
        "style    ok                  0.5",
        "types    1 finding          12.0",
    ]


def test_list_describes_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        check.name for check in CHECKS
    ]


def test_an_unknown_check_ends_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["lnit"])
    assert "'lnit' is no check" in capsys.readouterr().err
