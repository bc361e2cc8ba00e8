"""The steps of a release: copy, build, check, install, publish, commit and tag."""

import os
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from checks.commands import captured
from checks.findings import Finding
from releasing.distributions import files_of
from releasing.plan import ReleasePlan


class ReleaseError(RuntimeError):
    """A step of a release that failed; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeState:
    """The state of a working tree.

    Attributes:
        commit: The commit that is checked out.
        uncommitted: The files that are changed or unknown, as git lists them.
        tags: The tags of the repository.
    """

    commit: str
    uncommitted: tuple[str, ...]
    tags: tuple[str, ...]


def read_tree(root: Path) -> TreeState:
    """Return what git says of a working tree."""
    status = _git(root, "status", "--porcelain").splitlines()
    return TreeState(
        commit=_git(root, "rev-parse", "HEAD").strip(),
        uncommitted=tuple(line[3:] for line in status),
        tags=tuple(_git(root, "tag", "--list").split()),
    )


def copy_with_changes(plan: ReleasePlan, *, root: Path, commit: str, copy: Path) -> None:
    """Write the tracked files of a commit, as the plan changes them, into a new folder."""
    command = ["git", "archive", "--format=tar", commit]
    archive = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if archive.returncode:
        raise ReleaseError(f"{shlex.join(command)} failed: {archive.stderr.decode().strip()}")
    copy.mkdir(parents=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(copy, filter="data")
    write_changes(plan, copy)
    advice = "Run `uv lock`, commit, and release again."
    _called([_uv(), "lock", "--check"], cwd=copy, advice=advice)


def write_changes(plan: ReleasePlan, folder: Path) -> None:
    """Write the files of the plan below a folder."""
    for change in plan.changes:
        (folder / change.path).write_text(change.text, encoding="utf-8")


def build(copy: Path, folder: Path) -> tuple[Path, ...]:
    """Build the sdist and wheel of every package and return their files."""
    command = [_uv(), "build", "--quiet", "--all-packages", "--out-dir", str(folder)]
    _called(command, cwd=copy, advice="Repair the package that does not build, commit, and release again.")
    return tuple(sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")]))


def refuse(findings: Sequence[Finding]) -> None:
    """End the release if a check found anything.

    Raises:
        ReleaseError: There are findings.
    """
    if findings:
        listed = "\n".join(f"  {finding}" for finding in findings)
        raise ReleaseError(f"{listed}\nRepair what is listed, commit, and release again.")


def keep(files: Sequence[Path], folder: Path) -> None:
    """Copy built files into a folder, over older ones of the same names."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)


def check_unchanged(root: Path, state: TreeState) -> None:
    """Check that a working tree still is as it was when the release was planned.

    Raises:
        ReleaseError: Another commit is checked out, or a file has changed.
    """
    now = read_tree(root)
    if now.commit != state.commit or now.uncommitted:
        changed = ", ".join(now.uncommitted) or f"the commit, now {now.commit[:12]}"
        raise ReleaseError(f"the working tree changed during the release: {changed}. Release again.")


def publish(plan: ReleasePlan, folder: Path, *, index: str | None) -> None:
    """Upload the sdist and wheel of each package, in the order of the plan.

    Args:
        plan: The plan of the release.
        folder: The folder of the built files, which stays.
        index: The address to upload to; uv's default if left out.

    Raises:
        ReleaseError: An upload failed; the message names the packages that are published and those that are not.
    """
    address = ["--publish-url", index] if index else []
    for number, package in enumerate(plan.packages):
        print(f"  {package.distribution}", flush=True)
        pending = plan.packages[number:]
        files = [str(folder / name) for name in files_of(pending, plan.version)]
        done = ", ".join(other.distribution for other in plan.packages[:number]) or "nothing"
        advice = (
            f"Published: {done}. The working tree is as it was. Once the cause is repaired, upload the rest, then "
            f"write, commit and tag:\n  {shlex.join(['uv', 'publish', *address, *files])}\n"
            f"  uv run python tools/release.py {plan.version} --no-publish"
        )
        _called([_uv(), "publish", *address, *files[:2]], cwd=folder, advice=advice)


def commit_and_tag(plan: ReleasePlan, *, root: Path, state: TreeState, published: bool) -> None:
    """Write the plan's files into the working tree, commit them and set the tag.

    Raises:
        ReleaseError: git refused; the working tree is as it was.
    """
    paths = [change.path for change in plan.changes]
    command = f"uv run python tools/release.py {plan.version} --no-publish"
    done = "Everything is published" if published else "Nothing is published"
    advice = f"{done}, and the working tree is as it was. Repair the cause, then: {command}"
    is_done = False
    try:
        write_changes(plan, root)
        _called(["git", "add", "--", *paths], cwd=root, advice=advice)
        _called(["git", "commit", "--quiet", "-m", f"Release {plan.version}"], cwd=root, advice=advice)
        _called(["git", "tag", "-a", plan.tag, "-m", f"Release {plan.version}"], cwd=root, advice=advice)
        is_done = True
    finally:
        if not is_done:
            _git(root, "reset", "--quiet", "--soft", state.commit)
            _git(root, "restore", f"--source={state.commit}", "--staged", "--worktree", "--", *paths)


def check_identity(root: Path) -> None:
    """Check that git knows who commits, before anything is published.

    Raises:
        ReleaseError: git has no name or address to commit under.
    """
    advice = "Set git's user.name and user.email."
    _called(["git", "var", "GIT_COMMITTER_IDENT"], cwd=root, advice=advice)


def _git(root: Path, *arguments: str) -> str:
    return _called(["git", *arguments], cwd=root, advice="Run this in a checkout of the repository.")


def _called(command: Sequence[str], *, cwd: Path, advice: str) -> str:
    finished = captured(command, cwd=cwd)
    if finished.returncode:
        said = (finished.stdout + finished.stderr).strip()
        raise ReleaseError(f"exit code {finished.returncode} of `{shlex.join(command)}`\n{said}\n{advice}")
    return finished.stdout


def _uv() -> str:
    return os.environ.get("UV", "uv")
