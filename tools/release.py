"""Release all packages of the workspace at one version.

    uv run python tools/release.py VERSION [--dry-run] [--no-publish] [--index URL] [--out FOLDER]

All of it is tried in a temporary copy first. The working tree changes in the last step alone: one commit and its tag,
which are not pushed. `--dry-run` ends before anything is published, committed or tagged. The exit code is 1 if the
release was refused or failed.
"""

import argparse
import datetime
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from checks.workspace import read_packages
from releasing.distributions import check_distributions, try_alone
from releasing.execution import (
    ReleaseError,
    TreeState,
    build,
    check_identity,
    check_unchanged,
    commit_and_tag,
    copy_with_changes,
    keep,
    publish,
    read_tree,
    refuse,
)
from releasing.plan import ReleasePlan, plan_release, read_texts

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str], *, root: Path = ROOT, alone: Sequence[str] | None = None) -> int:
    """Release what the command line asks for.

    Args:
        arguments: The arguments of the command line.
        root: The repository to release from.
        alone: The folder names of the packages that are installed alone; all of them if left out.

    Returns:
        The exit code of the process.
    """
    parser = argparse.ArgumentParser(prog="tools/release.py", description="Release all packages together.")
    parser.add_argument("version", metavar="VERSION", help="the version to release, such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="do all but publish, commit and tag")
    parser.add_argument(
        "--no-publish", action="store_true", help="commit and tag only; the workflow of the tag publishes"
    )
    parser.add_argument("--index", metavar="URL", help="where to upload to; uv's default if left out")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="where to keep the built files; dist/VERSION if left out, nowhere in a dry run",
    )
    options = parser.parse_args(arguments)
    try:
        state = read_tree(root)
        packages = read_packages(root)
        plan = plan_release(
            options.version,
            date=datetime.datetime.now(datetime.UTC).date(),
            packages=packages,
            texts=read_texts(root, packages),
            uncommitted=state.uncommitted,
            tags=state.tags,
        )
        _say("plan", plan.described())
        if not options.dry_run:
            check_identity(root)
        kept = options.out.resolve() if options.out else root / "dist" / plan.version
        with tempfile.TemporaryDirectory(prefix="release-") as folder:
            files = _try(plan, root=root, state=state, folder=Path(folder), alone=alone)
            check_unchanged(root, state)
            if options.out or not options.dry_run:
                keep(files, kept)
                _say("keep", f"the built files are in {kept}")
        if options.dry_run:
            _say("dry run", "all but publish, commit and tag is done; the working tree is as it was")
        else:
            _finish(plan, root, state, kept=kept, publishes=not options.no_publish, index=options.index)
    except (ReleaseError, ValueError, subprocess.CalledProcessError) as error:
        print(f"\nrelease: {error}", file=sys.stderr)
        return 1
    return 0


def _try(
    plan: ReleasePlan, *, root: Path, state: TreeState, folder: Path, alone: Sequence[str] | None
) -> tuple[Path, ...]:
    """Build, check and install everything in a copy of the repository, and return the built files."""
    copy, built = folder / "copy", folder / "built"
    _say("copy", f"commit {state.commit[:12]} with {len(plan.changes)} files changed")
    copy_with_changes(plan, root=root, commit=state.commit, copy=copy)
    _say("build", "the sdist and wheel of every package")
    files = build(copy, built)
    print("\n".join(f"  {file.name} ({file.stat().st_size / 1000:.0f} kB)" for file in files))
    _say("check", "contents and metadata of every file")
    refuse(check_distributions(copy, built, plan.packages, plan.version))
    print(f"  {len(files)} files: nothing missing, nothing strange, metadata valid")
    _say("install", "each wheel alone in a fresh environment, and all its public names imported")
    refuse(try_alone(copy, built, plan.packages, plan.version, names=alone))
    return files


def _finish(
    plan: ReleasePlan, root: Path, state: TreeState, *, kept: Path, publishes: bool, index: str | None
) -> None:
    """Publish, commit and tag what was tried."""
    if publishes:
        _say("publish", "each package behind what it depends on")
        publish(plan, kept, index=index)
    _say("commit", f"Release {plan.version}, tag {plan.tag}")
    commit_and_tag(plan, root=root, state=state, published=publishes)
    _say("done", f"push it: git push --atomic origin HEAD {plan.tag}")


def _say(step: str, text: str) -> None:
    print(f"\n{step}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
