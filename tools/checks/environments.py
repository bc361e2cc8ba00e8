"""Fresh environments to try wheels in, as a user gets them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.workspace import Package

# What a test run itself needs; everything else must come from the package's own declarations.
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "sybil")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment at `folder`."""

    folder: Path

    @property
    def scripts(self) -> Path:
        """Where its programs stand."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    def variables(self) -> dict[str, str]:
        """What a program of this environment gets on top of its caller's variables."""
        # Every environment stands at the same path in its turn, so that torch's modules are compiled once for all.
        bytecode = self.folder.with_name(f"{self.folder.name}-bytecode")
        paths = os.pathsep.join([str(self.scripts), os.environ.get("PATH", "")])
        return {
            "PATH": paths,
            "PYTHONPYCACHEPREFIX": str(bytecode),
            "PYTHONPATH": "",
            # DeepSpeed's operator is of this torch, and a run that is killed leaves a lock beside it.
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions"),
            "VIRTUAL_ENV": str(self.folder),
        }


def find_python(version: str) -> Path | None:
    """Return this machine's interpreter of a version such as 3.12, None if there is none; nothing is downloaded."""
    # pyenv's shims fail for all versions but the folder's, and uv stops at the first program that fails.
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [*map(str, pyenv.glob(f"versions/{version}.*/bin")), os.environ.get("PATH", "")]
    search = ["python", "find", "--no-project", "--system", "--no-python-downloads", version]
    found = subprocess.run(
        [os.environ.get("UV", "uv"), *search],
        env={**os.environ, "PATH": os.pathsep.join(folders)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return Path(found.stdout.strip()) if found.returncode == 0 else None


def fresh_environment(folder: Path, python: Path = Path(sys.executable)) -> Environment:
    """Make an empty environment at `folder`, for the Python that runs this or another; an older one is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    _uv("venv", "--quiet", "--no-project", "--python", str(python), str(folder), cwd=folder.parent.parent)
    return Environment(folder=folder)


def install(
    environment: Environment,
    requirements: Sequence[str],
    *,
    constraints: Path,
    find_links: Path | None = None,
) -> None:
    """Install requirements, at the versions that `constraints` names where it names one.

    Args:
        environment: The environment to install into.
        requirements: The distributions to install, as an installer takes them.
        constraints: The file of the versions to keep to.
        find_links: A folder of distributions that are found beside those of the index.
    """
    python = str(environment.scripts / "python")
    # No workspace sources: what is not given as a wheel comes from the index, as it does for a user.
    arguments = [
        "pip",
        "install",
        "--quiet",
        "--no-sources",
        "--python",
        python,
        "--constraint",
        str(constraints),
        *(["--find-links", str(find_links)] if find_links else []),
    ]
    _uv(*arguments, *requirements, cwd=environment.folder.parent)


def build_wheels(root: Path, folder: Path) -> dict[str, Path]:
    """Build every package's wheel into `folder`; the wheels by distribution."""
    shutil.rmtree(folder, ignore_errors=True)
    _uv("build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(folder), cwd=root)
    return {wheel.name.partition("-")[0].replace("_", "-"): wheel for wheel in sorted(folder.glob("*.whl"))}


def locked_versions(root: Path, file: Path, *, without: Sequence[str] = ()) -> Path:
    """Write the lock's versions of third parties as a requirements file.

    Args:
        root: The repository.
        file: The file to write.
        without: Write what a plain `uv sync` brings, but for these distributions and whatever only they need; if
            left out, write all that the lock names.

    Returns:
        `file`.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    selection = [word for name in without for word in ("--prune", name)] or ["--all-packages", "--all-extras"]
    form = ["--no-emit-workspace", "--no-hashes", "--no-annotate", "--frozen"]
    _uv("export", "--quiet", *form, *selection, "--output-file", str(file), cwd=root)
    return file


def requirements_of(package: Package, brought: Sequence[Package], wheels: dict[str, Path]) -> list[str]:
    """What is handed to the installer: the package's wheel and those of the siblings it declares."""
    extras = f"[{','.join(package.alone_extras)}]" if package.alone_extras else ""
    own = f"{package.distribution}{extras} @ {wheels[package.distribution].as_uri()}"
    return [own, *(f"{other.distribution} @ {wheels[other.distribution].as_uri()}" for other in brought)]


def _uv(*arguments: str, cwd: Path) -> None:
    cwd.mkdir(parents=True, exist_ok=True)
    program = os.environ.get("UV", "uv")
    subprocess.run([program, *arguments], cwd=cwd, stdin=subprocess.DEVNULL, check=True)
