"""A selection of the fast tests under several versions of torch and Python, each in an environment of its own."""

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from checks.commands import shown
from checks.commits import DRAWN, drawn_by_commit
from checks.environments import (
    TEST_TOOLS,
    build_wheels,
    find_python,
    fresh_environment,
    install,
    locked_versions,
)
from checks.findings import Finding

LOCKED = "locked"
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
# Compiles torch's modules and DeepSpeed's operator once: the first tests would do so within their own limits.
_COMPILE = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import torch._dynamo, torch.distributed.elastic.agent.server.local_elastic_agent, torch.distributed.fsdp
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()
"""
# What the selection needs beside the packages.
_EXTRAS = {"drivetrain-deepspeed": "[deepspeed]"}
# They are meant to take less than five minutes on a machine that does nothing else, and are ended after this.
TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version of torch, and the Python it is tried under.

    Attributes:
        torch: Major and minor version, or "locked" for that of uv.lock.
        python: Major and minor version.
    """

    torch: str
    python: str

    def __str__(self) -> str:
        return f"torch {self.torch} on Python {self.python}"


# Each torch under one Python, not all of them under each: the oldest pair, the newest, and two in between. The tests
# of CONTRIBUTING.md run the locked torch under the Python of whoever runs them.
TABLE = (
    Version(torch="2.9", python="3.11"),
    Version(torch="2.11", python="3.12"),
    Version(torch="2.13", python="3.13"),
    Version(torch=LOCKED, python="3.13"),
)
# What the command line takes: no version of torch has the name of one of Python.
WORDS = tuple(dict.fromkeys([*(v.torch for v in TABLE), *sorted({v.python for v in TABLE}), DRAWN]))

# What a version of torch may break: each backend's contract, and whatever reads torch beyond its public names.
SELECTION = (
    # what torch lacks, line by line of docs/design/platforms.md
    "tests/test_torch_versions.py",
    # the contract of each backend, with one, two and four processes
    "tests/backends/composed/test_contract.py",
    "tests/backends/fsdp/test_fsdp_contract.py",
    "tests/deepspeed/test_contract.py",
    # the private names of torch that each package relies on
    "tests/accelerate/plugins/test_compat.py",
    "tests/accelerate/test_compat.py",
    "tests/backends/fsdp/test_compat.py",
    "tests/backends/test_compat.py",
    "tests/backends/ddp/test_compat.py",
    "tests/checkpoint/test_compat.py",
    "tests/data/test_compat.py",
    "tests/dispatch/test_compat.py",
    "tests/throughput/flops/test_compat.py",
    "tests/launcher/test_compat.py",
    "tests/memory/test_compat.py",
    "tests/parallel/stages/test_compat.py",
    "tests/parallel/test_compat.py",
    "tests/plan/test_compat.py",
    "tests/precision/test_compat.py",
    "tests/state/test_compat.py",
    # shards as a program sees them: the part of torch that changed most
    "tests/backends/fsdp/test_retained_models.py",
    "tests/backends/fsdp/models/test_sharded_parameter.py",
    # checkpoints
    "tests/checkpoint/saving/test_transaction.py",
    "tests/checkpoint/test_checkpointer.py",
    "tests/integration/test_save_and_resume.py",
    # loaders
    "tests/data/test_loader.py",
    # models without memory
    "tests/dispatch/offload/test_dispatch.py",
    "tests/dispatch/test_load_and_dispatch.py",
    # the launcher, with one process and two
    "tests/launcher/run/test_elastic.py",
    # the umbrella over all of them
    "tests/drivetrain/accelerator/test_accelerator.py",
)


def check(root: Path, words: Sequence[str] = ()) -> list[Finding]:
    """Run the selection under the versions that the words ask for.

    A Python that is not on this machine is named: its torch runs under another one, or not at all if the Python was
    asked for by name. Neither is a finding.

    Args:
        root: The repository.
        words: Words of the command line; see `choose`.
    """
    chosen = choose(words)
    found = {version.python: find_python(version.python) for version in chosen}
    pythons = {name: python for name, python in found.items() if python is not None}
    pythons.setdefault(RUNNING, Path(sys.executable))
    runs, notes = place(chosen, words, [*pythons])
    print("\n".join(notes), flush=True)
    build = root / "build" / "versions"
    wheels = build_wheels(root, build / "wheels")
    findings: list[Finding] = []
    for version in runs:
        findings += _try(root, build, version, pythons[version.python], wheels)
    shutil.rmtree(build / "environment", ignore_errors=True)
    return findings


def choose(words: Sequence[str]) -> tuple[Version, ...]:
    """The versions that words of the command line ask for.

    Versions of torch, or of Python, narrow the table down to theirs; both ask for each pair of them, in the table or
    not. `drawn` draws one of these by the commit's hash.

    Raises:
        ValueError: A word is none of WORDS.
    """
    if unknown := [word for word in words if word not in WORDS]:
        raise ValueError(f"{unknown[0]!r} is no version that is tried; there are {', '.join(WORDS)}")
    torches = [version.torch for version in TABLE if version.torch in words]
    pythons = [word for word in WORDS if word in words and word in {v.python for v in TABLE}]
    if torches and pythons:
        chosen = tuple(Version(torch=torch, python=python) for torch, python in product(torches, pythons))
    else:
        chosen = tuple(v for v in TABLE if v.torch in torches or v.python in pythons) or TABLE
    if DRAWN not in words:
        return chosen
    (name,) = drawn_by_commit([str(version) for version in chosen], 1)
    return tuple(version for version in chosen if str(version) == name)


def place(
    chosen: Sequence[Version], words: Sequence[str], here: Sequence[str]
) -> tuple[list[Version], list[str]]:
    """The versions that run on this machine, and what is to be said of the others.

    Args:
        chosen: The versions that were asked for.
        words: The words that asked for them.
        here: The Pythons of this machine, the one that runs this included.
    """
    runs: list[Version] = []
    notes: list[str] = []
    for version in chosen:
        if version.python in here:
            runs.append(version)
        elif version.python in words:
            notes.append(f"no Python {version.python} on this machine: {version} is not run")
        else:
            runs.append(Version(torch=version.torch, python=RUNNING))
            notes.append(f"no Python {version.python} on this machine: {runs[-1]} takes its place")
    return runs, notes


def _try(
    root: Path, build: Path, version: Version, python: Path, wheels: Mapping[str, Path]
) -> list[Finding]:
    """Install the packages beside a version of torch, and run the selection."""
    begin = time.monotonic()
    environment = fresh_environment(build / "environment" / version.torch, python)
    given = [f"{name}{_EXTRAS.get(name, '')} @ {wheel.as_uri()}" for name, wheel in wheels.items()]
    try:
        if version.torch == LOCKED:
            torch, constraints = "torch", locked_versions(root, build / "locked.txt")
        else:  # what torch brings by itself, in versions of its own, is left to the installer
            torch = f"torch=={version.torch}.*"
            constraints = locked_versions(root, build / "others.txt", without=("torch", "setuptools"))
        install(environment, [torch, *given, "numpy", *TEST_TOOLS], constraints=constraints)
    except subprocess.CalledProcessError as error:
        message = f"does not install: uv ended with exit code {error.returncode}"
        return [Finding(where=str(version), message=message)]
    variables = environment.variables()
    compiling = [str(environment.scripts / "python"), "-c", _COMPILE]
    testing = [str(environment.scripts / "pytest"), "-q", "-rs", "-p", "no:cacheprovider", *SELECTION]
    run = partial(shown, str(version), cwd=root, timeout_seconds=TIMEOUT_SECONDS, environment=variables)
    found = run(compiling)
    installed = time.monotonic()
    found += run(testing)
    tested = time.monotonic() - installed
    print(f"{version}: installed in {installed - begin:.0f} s, tested in {tested:.0f} s", flush=True)
    shutil.rmtree(environment.folder, ignore_errors=True)
    return found
