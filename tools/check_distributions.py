"""Check the built files of a release.

    uv run python tools/check_distributions.py FOLDER [--version VERSION] [--order FILE]

Contents and metadata of every sdist and wheel in the folder are checked against the working tree; each wheel is
installed alone and imported. The workflow of a release's tag runs this before it publishes. The exit code is 1 if
anything was found.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from checks.workspace import read_packages
from releasing.distributions import check_distributions, files_of, try_alone
from releasing.plan import publishing_order
from releasing.versions import check_in_step

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str], *, root: Path = ROOT) -> int:
    """Check the folder that the command line names and print what is found."""
    parser = argparse.ArgumentParser(prog="tools/check_distributions.py", description="Check built files.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the sdists and wheels are")
    parser.add_argument("--version", help="the version that all must have; that of the packages if left out")
    parser.add_argument(
        "--order", metavar="FILE", type=Path, help="where to write the order in which to publish the files"
    )
    options = parser.parse_args(arguments)
    packages = publishing_order(read_packages(root).values())
    version = options.version or packages[-1].version
    folder = options.folder.resolve()
    try:
        check_in_step(packages, version=version)
    except ValueError as error:
        parser.error(str(error))
    found = check_distributions(root, folder, packages, version) or try_alone(root, folder, packages, version)
    print("\n".join(str(finding) for finding in found) or f"{2 * len(packages)} files are as they must be")
    if options.order and not found:
        options.order.write_text("\n".join([*files_of(packages, version), ""]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
