"""No false alarm: on the examples, the pages, and training scripts that packages ship; true findings are listed."""

import re
from pathlib import Path

import pytest

from drivetrain_lint.checker import check_document
from drivetrain_lint.finding import Finding
from drivetrain_lint.reading.documents import parse_document, read_document
from drivetrain_lint.rules.registry import choose_rules
from lint import lint_corpus

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *ROOT.glob("packages/*/README.md")])
# A page whose blocks are several programs, joined here: the one that saves on a warning runs on one process.
SAVES_ON_ONE_PROCESS = "memory_tracker.md"


def unexpected(name: str, path: Path) -> list[Finding]:
    """The findings of a file that its entry does not list."""
    codes, _ = lint_corpus.TRUE.get(name, (set[str](), ""))
    found = check_document(read_document(path, shown=name), rules=choose_rules())
    assert codes <= {finding.code for finding in found}, f"{name}: listed, and not found any more"
    return [finding for finding in found if finding.code not in codes]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_our_examples_are_clean(path: Path) -> None:
    assert unexpected(path.name, path) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_our_pages_is_clean(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    document = parse_document("\n".join(blocks), shown=page.name)
    found = [(each.code, each.what) for each in check_document(document, rules=choose_rules())]
    if page.name == SAVES_ON_ONE_PROCESS:
        found = [(code, what) for code, what in found if code != "DT501"]
    assert found == []


INSTALLED = list(lint_corpus.files(lint_corpus.DEVELOPMENT))


@pytest.mark.parametrize(("name", "path"), INSTALLED, ids=[name for name, _ in INSTALLED])
def test_what_installed_packages_ship_is_clean(name: str, path: Path) -> None:
    assert unexpected(name, path) == []


def test_the_development_environment_has_a_corpus_of_thirty() -> None:
    distributions = {name.partition("/")[0] for name, _ in INSTALLED}
    if not {"torchao", "deepspeed", "lightning_fabric"} <= distributions:
        pytest.skip("the frameworks are not installed")
    assert len(INSTALLED) >= 30


ALL = [*lint_corpus.files(lint_corpus.LONG), *lint_corpus.files(lint_corpus.ELSEWHERE)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), ALL, ids=[name for name, _ in ALL])
def test_longer_files_and_scripts_of_other_projects_have_true_findings_alone(name: str, path: Path) -> None:
    assert unexpected(name, path) == []
