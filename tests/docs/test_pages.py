"""What a page must be, beside that its code runs (conftest.py at the root runs it)."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted(ROOT.glob("packages/*/README.md"))
HOW_TOS = sorted(page for page in ROOT.glob("docs/howto/*.md") if page.name != "scripts.md")
PAGES = [ROOT / "docs" / "index.md", *sorted(ROOT.glob("docs/start/*.md")), *HOW_TOS, *READMES]
# python runs as a test; these are read only. Any other word could hide Python that never runs.
SHOWN = {"python", "console", "text", "yaml", "toml", "json", "bash", "{toctree}", "{include}"}


def identity(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def block_languages(text: str) -> list[str]:
    """The word after each fence that opens a block."""
    fences = re.findall(r"^ *(```+)([^\n`]*)$", text, flags=re.MULTILINE)
    return [word.strip().partition(" ")[0] for _, word in fences[::2]]


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_every_block_says_what_it_is(page: Path) -> None:
    unknown = set(block_languages(page.read_text())) - SHOWN
    assert not unknown, (
        f"{sorted(unknown)}: Python that runs is ```python; what must not run is ```console or ```text"
    )


@pytest.mark.parametrize("page", READMES, ids=identity)
def test_a_package_readme_stands_alone(page: Path) -> None:
    text = page.read_text()
    distribution = "drivetrain" if page.parent.name == "drivetrain" else f"drivetrain-{page.parent.name}"
    assert text.startswith(f"# {distribution}\n")
    assert re.search(rf"(pip install|uv add) ['\"]?{distribution}\b", text), "no line that installs it"
    assert "python" in block_languages(text), "no example that runs"


@pytest.mark.parametrize("page", HOW_TOS, ids=identity)
def test_a_how_to_shows_code_that_runs_or_commands(page: Path) -> None:
    assert {"python", "console"} & set(block_languages(page.read_text()))
