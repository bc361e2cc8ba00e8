import datetime
import io
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from check_distributions import main as check_built
from checks.workspace import Package, read_packages
from release import main
from releasing.changelog import NO_CHANGES, cut
from releasing.distributions import check_distributions, files_of, sdist_of, wheel_of
from releasing.execution import ReleaseError, check_unchanged, commit_and_tag, publish, read_tree
from releasing.plan import ReleasePlan, plan_release, publishing_order, read_texts

ROOT = Path(__file__).resolve().parents[2]
DAY = datetime.date(2026, 11, 23)
CHANGELOG = "# Changelog of a toy\n\n## 0.1.0 (unreleased)\n\n- A first change.\n"


def package(name: str, *dependencies: str, version: str = "0.1.0") -> Package:
    return Package(
        name=name,
        distribution=f"toy-{name}",
        module=f"toy_{name}",
        version=version,
        description="A toy.",
        dependencies=dependencies,
        alone_extras=(),
        backends={},
    )


def project(name: str, *requirements: str, version: str = "0.1.0") -> str:
    return (
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {list(requirements)!r}\n'.replace(
            "'", '"'
        )
    )


def toy_texts() -> dict[str, str]:
    return {
        "pyproject.toml": project("toy-workspace", "toy-all"),
        "uv.lock": "".join(
            f'[[package]]\nname = "{name}"\nversion = "0.1.0"\n\n'
            for name in ("toy-all", "toy-base", "toy-workspace", "torch")
        ),
        "packages/all/pyproject.toml": project("toy-all", "toy-base[extra]==0.1.0"),
        "packages/base/pyproject.toml": project("toy-base", "torch>=2.9"),
        "packages/all/CHANGELOG.md": CHANGELOG,
        "packages/base/CHANGELOG.md": CHANGELOG,
    }


TOYS = {"all": package("all", "toy-base"), "base": package("base", "torch")}


def planned(version: str = "0.2.0", **changed: object) -> ReleasePlan:
    given = {"date": DAY, "packages": TOYS, "texts": toy_texts(), **changed}
    return plan_release(version, **given)


def test_the_plan_names_the_packages_in_order_and_every_changed_file() -> None:
    plan = planned()
    assert (plan.previous, plan.version, plan.tag) == ("0.1.0", "0.2.0", "v0.2.0")
    assert [p.distribution for p in plan.packages] == ["toy-base", "toy-all"]
    assert sorted(change.path for change in plan.changes) == sorted(toy_texts())
    assert plan.described().splitlines()[:3] == [
        "0.1.0 -> 0.2.0, tag v0.2.0",
        "   1. toy-base",
        "   2. toy-all",
    ]


def test_every_file_gets_the_version_and_nothing_else() -> None:
    texts = {change.path: change.text for change in planned().changes}
    assert texts["pyproject.toml"] == project("toy-workspace", "toy-all", version="0.2.0")
    assert texts["packages/all/pyproject.toml"] == project(
        "toy-all", "toy-base[extra]==0.2.0", version="0.2.0"
    )
    assert texts["packages/base/pyproject.toml"] == project("toy-base", "torch>=2.9", version="0.2.0")
    assert texts["uv.lock"].count('"0.2.0"') == 3
    assert 'name = "torch"\nversion = "0.1.0"' in texts["uv.lock"]
    assert "## 0.2.0 (2026-11-23)" in texts["packages/base/CHANGELOG.md"]


@pytest.mark.parametrize("version", ["0.1.0", "0.1.1", "0.2.0rc1", "0.2.0", "0.10.0", "1.0", "0.1.0.post1"])
def test_a_newer_version_is_accepted(version: str) -> None:
    assert planned(version).version == version


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.0.9", "older than the present 0.1.0"),
        ("0.1.0rc1", "older than"),
        ("next", "is no version"),
        ("0.2.0-rc1", "write 0.2.0rc1"),
        ("v0.2.0", "write 0.2.0"),
        ("0.2.0+mine", "local"),
    ],
)
def test_an_older_or_malformed_version_is_refused(version: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(version)


def test_a_dirty_tree_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not clean: commit or remove a\.py, b\.py"):
        planned(uncommitted=("a.py", "b.py"))


def test_a_tag_that_exists_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tag v0\.2\.0 exists"):
        planned(tags=("v0.2.0",))


def test_a_package_out_of_step_is_refused() -> None:
    packages = {**TOYS, "base": replace(TOYS["base"], version="0.0.9")}
    with pytest.raises(ValueError, match=r"toy-base has version 0\.0\.9, the workspace 0\.1\.0"):
        planned(packages=packages)


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("packages/base/CHANGELOG.md", "# Changelog\n\n## 0.1.0 (2026-01-01)\n", "no unreleased section"),
        ("packages/base/CHANGELOG.md", "# Changelog\n", r"base/CHANGELOG\.md has no unreleased"),
        ("packages/base/CHANGELOG.md", f"{CHANGELOG}\n## 0.2.0 (2026-01-01)\n", "a section of 0.2.0 already"),
        ("packages/base/CHANGELOG.md", f"{CHANGELOG}\n## Unreleased\n", "not its first alone"),
        (
            "packages/all/pyproject.toml",
            project("toy-all", "toy_base<0.2"),
            "requires toy_base<0.2, which 0.2.0",
        ),
        (
            "packages/all/pyproject.toml",
            project("toy-all").replace("version =", "'version' ="),
            "does not say",
        ),
        ("uv.lock", "", "uv.lock does not name toy-workspace at 0.1.0: run `uv lock`"),
    ],
)
def test_a_file_without_its_place_for_the_version_is_refused(path: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(texts={**toy_texts(), path: text})


def test_packages_stand_behind_what_they_depend_on_and_else_by_name() -> None:
    packages = [package("a", "toy-c"), package("d", "toy-a", "toy-b"), package("c", "torch"), package("b")]
    assert [p.name for p in publishing_order(packages)] == ["b", "c", "a", "d"]


def test_a_circle_of_packages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"in a circle, toy-. -> toy-. -> toy-."):
        publishing_order([package("a", "toy-b"), package("b", "toy-a")])


def test_the_cut_of_a_changelog_keeps_what_was_released() -> None:
    text = f"{CHANGELOG}\n## 0.0.9 (2026-01-01)\n\n- Old.\n"
    assert cut(text, path="CHANGELOG.md", version="0.2.0", date=DAY) == (
        "# Changelog of a toy\n\n## Unreleased\n\n## 0.2.0 (2026-11-23)\n\n- A first change.\n"
        "\n## 0.0.9 (2026-01-01)\n\n- Old.\n"
    )


def test_a_second_release_without_changes_says_so() -> None:
    once = cut(CHANGELOG, path="CHANGELOG.md", version="0.2.0", date=DAY)
    twice = cut(once, path="CHANGELOG.md", version="0.2.1", date=DAY)
    assert f"## Unreleased\n\n## 0.2.1 (2026-11-23)\n\n{NO_CHANGES}\n\n## 0.2.0" in twice
    assert twice.endswith("- A first change.\n")


def test_the_packages_of_this_repository_can_be_released_from_the_lowest_floor_up() -> None:
    packages = read_packages(ROOT)
    newer = f"{int(packages['drivetrain'].version.partition('.')[0]) + 1}.0.0"
    plan = plan_release(newer, date=DAY, packages=packages, texts=read_texts(ROOT, packages))
    assert [package.name for package in plan.packages[-3:]] == ["drivetrain", "migration", "accelerate"]
    assert len(plan.changes) == 2 + 2 * len(packages)


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two toy packages, committed."""
    root = tmp_path / "repository"
    for path, text in toy_texts().items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    commit_all(root)
    return root


def commit_all(root: Path) -> None:
    git(root, "init", "--quiet", "--initial-branch=main")
    for key, value in {"user.name": "A", "user.email": "a@localhost", "commit.gpgsign": "false"}.items():
        git(root, "config", key, value)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--no-verify", "-m", "Begin")


def test_a_release_is_one_commit_and_its_tag(repository: Path) -> None:
    commit_and_tag(planned(), root=repository, state=read_tree(repository), published=False)
    assert git(repository, "log", "--format=%s").splitlines() == ["Release 0.2.0", "Begin"]
    assert read_tree(repository).tags == ("v0.2.0",)
    assert git(repository, "rev-parse", "v0.2.0^{commit}") == read_tree(repository).commit
    assert read_packages(repository)["base"].version == "0.2.0"
    assert read_tree(repository).uncommitted == ()


@pytest.mark.parametrize("broken", ["commit", "tag"])
def test_a_refused_commit_or_tag_leaves_the_tree_as_it_was(repository: Path, broken: str) -> None:
    if broken == "commit":
        hook = repository / ".git" / "hooks" / "pre-commit"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
    else:
        git(repository, "tag", "v0.2.0")
    before = read_tree(repository)
    with pytest.raises(ReleaseError, match="the working tree is as it was"):
        commit_and_tag(planned(), root=repository, state=before, published=True)
    assert read_tree(repository) == before
    assert read_texts(repository, TOYS) == toy_texts()


def test_a_tree_that_changed_during_the_release_ends_it(repository: Path) -> None:
    before = read_tree(repository)
    check_unchanged(repository, before)
    (repository / "new.py").write_text("")
    with pytest.raises(ReleaseError, match=r"changed during the release: new\.py"):
        check_unchanged(repository, before)


def test_the_command_refuses_a_dirty_tree(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "new.py").write_text("")
    assert main(["0.2.0", "--dry-run"], root=repository) == 1
    assert "not clean: commit or remove new.py" in capsys.readouterr().err


def toy_files(root: Path, toy: Package) -> dict[str, str]:
    files = {f"src/{toy.module}/__init__.py": "", f"src/{toy.module}/py.typed": "", "README.md": "# A toy\n"}
    for path, text in files.items():
        file = root / "packages" / toy.name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return files


def build_toy(folder: Path, toy: Package, files: dict[str, str], *, metadata_version: str = "0.2.0") -> None:
    folder.mkdir(exist_ok=True)
    metadata = (
        f"Metadata-Version: 2.4\nName: {toy.distribution}\nVersion: {metadata_version}\n"
        "Description-Content-Type: text/markdown\n\n# A toy\n"
    )
    with zipfile.ZipFile(folder / wheel_of(toy, "0.2.0"), "w") as wheel:
        for path, text in files.items():
            if path.startswith("src/"):
                wheel.writestr(path.removeprefix("src/"), text)
        wheel.writestr(f"{toy.module}-0.2.0.dist-info/METADATA", metadata)
    with tarfile.open(folder / sdist_of(toy, "0.2.0"), "w:gz") as sdist:
        for path, text in {**files, "PKG-INFO": metadata}.items():
            member = tarfile.TarInfo(f"{toy.module}-0.2.0/{path}")
            member.size = len(text.encode())
            sdist.addfile(member, io.BytesIO(text.encode()))


def test_good_distributions_pass_and_a_missing_one_is_found(tmp_path: Path) -> None:
    toy = TOYS["base"]
    build_toy(tmp_path / "built", toy, toy_files(tmp_path, toy))
    assert check_distributions(tmp_path, tmp_path / "built", [toy], "0.2.0") == []
    (tmp_path / "built" / sdist_of(toy, "0.2.0")).unlink()
    [finding] = check_distributions(tmp_path, tmp_path / "built", [toy], "0.2.0")
    assert str(finding) == "toy_base-0.2.0.tar.gz: was not built"


def test_the_files_of_a_package_stand_behind_those_that_it_depends_on() -> None:
    order = publishing_order(TOYS.values())
    assert files_of(order, "0.2.0") == [
        "toy_base-0.2.0.tar.gz",
        "toy_base-0.2.0-py3-none-any.whl",
        "toy_all-0.2.0.tar.gz",
        "toy_all-0.2.0-py3-none-any.whl",
    ]


@pytest.mark.parametrize(
    ("missing", "added", "metadata_version", "message"),
    [
        ("src/toy_base/py.typed", "", "0.2.0", "has no toy_base/py.typed"),
        ("src/toy_base/__init__.py", "", "0.2.0", "lacks toy_base/__init__.py"),
        ("", "src/conftest.py", "0.2.0", "whl: holds conftest.py, which is not the package's"),
        ("", "", "0.1.0", "the version is '0.1.0', not '0.2.0'"),
        ("", "", "zero", "'zero' is invalid for 'version'"),
    ],
)
def test_a_faulty_distribution_is_found(
    tmp_path: Path, missing: str, added: str, metadata_version: str, message: str
) -> None:
    toy = TOYS["base"]
    files = toy_files(tmp_path, toy)
    files.pop(missing, None)
    if added:
        files[added] = ""
    build_toy(tmp_path / "built", toy, files, metadata_version=metadata_version)
    found = check_distributions(tmp_path, tmp_path / "built", [toy], "0.2.0")
    assert message in "\n".join(str(finding) for finding in found)


def test_built_files_of_another_version_than_the_packages_are_refused(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        check_built([str(repository), "--version", "0.2.0"], root=repository)
    assert "toy-base has version 0.1.0, the workspace 0.2.0" in capsys.readouterr().err


@contextmanager
def index(*, accepts: int) -> Iterator[tuple[str, list[str]]]:
    """Serve an index that takes some uploads and refuses all others; give its address and the files it took."""
    taken: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            parts = BytesParser().parsebytes(head + body).get_payload()
            [name] = [name for part in parts if (name := part.get_filename())]
            if len(taken) < accepts:
                taken.append(name)
            self.send_response(200 if name in taken else 403)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The distributions of both toys, and a token to publish them with."""
    monkeypatch.setenv("UV_PUBLISH_TOKEN", "a-token")
    for toy in TOYS.values():
        build_toy(tmp_path / "built", toy, toy_files(tmp_path, toy))
    return tmp_path / "built"


def test_packages_are_published_in_the_order_of_the_plan(built: Path) -> None:
    with index(accepts=4) as (address, taken):
        publish(planned(), built, index=address)
    assert [name.partition("-")[0] for name in taken] == ["toy_base", "toy_base", "toy_all", "toy_all"]


def test_a_failed_upload_says_what_is_published_and_how_to_go_on(built: Path) -> None:
    with (
        index(accepts=2) as (address, _),
        pytest.raises(ReleaseError, match=r"(?s)Published: toy-base\. .*uv publish .*toy_all.*--no-publish"),
    ):
        publish(planned(), built, index=address)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_dry_run_builds_checks_and_installs_the_real_packages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "repository"
    for path in git(ROOT, "ls-files").splitlines():
        if (ROOT / path).is_file():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes((ROOT / path).read_bytes())
    commit_all(root)
    before = read_tree(root)
    major = int(read_packages(root)["drivetrain"].version.partition(".")[0]) + 1
    out = tmp_path / "out"
    code = main([f"{major}.0.0", "--dry-run", "--out", str(out)], root=root, alone=["config", "state"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert read_tree(root) == before
    assert len(list(out.iterdir())) == 2 * len(read_packages(root))
    for line in (f"drivetrain-config=={major}.0.0", f"drivetrain-state=={major}.0.0", "dry run: all but"):
        assert line in printed.out
