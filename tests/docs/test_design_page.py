"""The design page names files and code that exist: a map with a street that is gone leads astray."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text()
SOURCES = [file for folder in ("packages", "tools") for file in sorted((ROOT / folder).rglob("*.py"))]
PROJECTS = [*ROOT.glob("*.toml"), *ROOT.glob("packages/*/src/**/*.toml")]
LATER = {"context_parallel.py", "pipeline.py"}  # in brackets on the page
FILES = sorted(
    path
    for path in set(re.findall(r"`([\w/]+\.(?:py|toml))`", PAGE)) - LATER
    if not path.endswith("/x.py")  # an example of how paths are shortened
)
METHODS = sorted(set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGE)))
PLACES = sorted(set(re.findall(r"^\d+\. `([\w/]+\.py)`, `([\w.]+)`", PAGE, flags=re.MULTILINE)))
WORDS = sorted({word for word in re.findall(r"`(_?[A-Za-z]\w*)(?:\(\))?`", PAGE) if "_" in word.strip("_")})


def full_path(path: str) -> str:
    """Write a path of the page as the workspace has it: data/x.py is packages/data/src/drivetrain_data/x.py."""
    package, _, rest = path.partition("/")
    return f"drivetrain_{package}/{rest}" if (ROOT / "packages" / package).is_dir() and rest else path


@cache
def files_of(path: str) -> list[Path]:
    ends = (f"/{path}", f"/{full_path(path)}")
    return [file for file in (*SOURCES, *PROJECTS) if file.as_posix().endswith(ends)]


@cache
def members_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    members = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return members | {
        f"{owner.name}.{node.name}"
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
    }


def test_files_on_the_page_exist() -> None:
    assert [path for path in FILES if not files_of(path)] == []


def test_the_steps_of_a_walk_stand_in_their_files() -> None:
    astray = [
        (path, name) for path, name in PLACES if not any(name in members_of(file) for file in files_of(path))
    ]
    assert astray == []


def test_the_table_says_what_a_package_needs() -> None:
    rows = re.findall(r"^\| drivetrain-(\w+) \| \w+ \| ([^|]+) \|", PAGE, flags=re.MULTILINE)
    for name, needs in rows:
        project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
        declared = [re.split(r"[^\w-]", text)[0] for text in project.get("dependencies", ())]
        assert set(needs.split(", ")) == {each.removeprefix("drivetrain-") for each in declared} or {
            "stdlib"
        }, name


def test_names_on_the_page_exist() -> None:
    texts = {file: file.read_text() for file in SOURCES}
    known = {word for text in texts.values() for word in re.findall(r"\w+", text)}
    known.update(part for file in SOURCES for part in file.with_suffix("").parts)
    astray = [word for word in WORDS if word not in known]
    for method in METHODS:
        holders = [file for file, text in texts.items() if f"class {method.partition('.')[0]}" in text]
        astray += [] if any(method in members_of(file) for file in holders) else [method]
    for module, name in sorted(set(re.findall(r"`([a-z_]+)\.([a-z_]+)`", PAGE))):
        files = [file for file in files_of(f"{module}.py") if file.stem == module]
        is_code = name not in ("py", "json", "seed")  # data.seed is a setting
        if files and is_code and not any(name in members_of(file) for file in files):
            astray.append(f"{module}.{name}")
    assert astray == []
