"""Every check of the repository behind one command: `uv run python tools/check.py [NAME ...]`.

Without a name the fast checks run. `--list` says what each one looks at. `alone` takes packages' names too:
`tools/check.py alone state data`; and `versions` takes versions of torch and Python: `tools/check.py versions 2.11`.
`alone drawn`, `versions drawn` and `xla drawn` try some that the commit draws. `test --changed` runs the tests that
the changes since the last commit can reach by imports, `test --changed main` those since main. `cuda --dry` plays
what a card's tests and benchmarks show without a card. The exit code is 1 if anything was found.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from checks import (
    alone,
    cuda,
    english,
    floors,
    names,
    site,
    sizes,
    style,
    suite,
    transformer_engine,
    types,
    versions,
    xla,
)
from checks.commits import DRAWN
from checks.findings import Finding
from checks.workspace import read_packages

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check that can be asked for by name; `run` takes the repository's root."""

    name: str
    run: Callable[[Path], list[Finding]]
    looks_at: str
    slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check found, and how long it took."""

    check: Check
    findings: tuple[Finding, ...]
    seconds: float


CHECKS = (
    Check(name="style", run=style.check, looks_at="ruff's rules and formatting"),
    Check(name="types", run=types.check, looks_at="pyright, strict"),
    Check(name="floors", run=floors.check, looks_at="imports point down the floors of docs/design.md only"),
    Check(
        name="sizes",
        run=sizes.check,
        looks_at="lengths of files and functions, module names, forbidden calls",
    ),
    Check(
        name="english",
        run=english.check,
        looks_at="docstrings begin with a verb or a noun, and say something",
    ),
    Check(name="names", run=names.check, looks_at="names of public classes that stand twice"),
    Check(name="docs", run=site.check, looks_at="the site builds without a warning, every code block runs"),
    Check(name="test", run=suite.check, looks_at="the README's test command", slow=True),
    Check(
        name="alone",
        run=alone.check,
        looks_at="each package's tests but costly ones, with only its wheel installed",
        slow=True,
    ),
    Check(
        name="versions",
        run=versions.check,
        looks_at="a selection of the fast tests under four versions of torch and three of Python",
        slow=True,
    ),
    Check(
        name="cuda",
        run=cuda.check,
        looks_at="tests and benchmarks on a CUDA device; with --dry, what of them can be played without one",
        slow=True,
    ),
    Check(
        name="te",
        run=transformer_engine.check,
        looks_at="the tests with Transformer Engine, in envs/te, which compiles it once",
        slow=True,
    ),
    Check(
        name="xla",
        run=xla.check,
        looks_at="the tests with torch-xla, in envs/xla, on one, two and four devices of its processor",
        slow=True,
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Run the checks that are asked for and print one table."""
    parser = argparse.ArgumentParser(prog="tools/check.py", description="Check the repository.")
    parser.add_argument(
        "names", nargs="*", help="checks to run; after `alone`, packages; after `versions`, versions"
    )
    parser.add_argument("--list", action="store_true", help="say what each check looks at")
    parser.add_argument(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="COMMIT",
        help="with `test`: only the tests that the changes since a commit can reach (the last one by default)",
    )
    parser.add_argument("--dry", action="store_true", help="with `cuda`: play what needs no card")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(_described(check) for check in CHECKS))
        return 0
    try:
        chosen = choose(
            options.names,
            known_packages=tuple(read_packages(ROOT)),
            changed_since=options.changed,
            dry=options.dry,
        )
    except ValueError as error:
        parser.error(str(error))
    outcomes = [_run(check) for check in chosen]
    print(report(outcomes))
    return 1 if any(outcome.findings for outcome in outcomes) else 0


def choose(
    names: Sequence[str],
    *,
    known_packages: Sequence[str],
    changed_since: str | None = None,
    dry: bool = False,
) -> tuple[Check, ...]:
    """The checks that the words of the command line ask for, in the order of CHECKS.

    Words that name packages narrow `alone` down to these, and versions of torch and Python `versions`;
    a commit narrows `test` down to the changes since; `dry` has `cuda` play what needs no card.

    Raises:
        ValueError: A word is none of these, or packages are named without `alone`, versions without `versions`, a
            commit without `test`, or `dry` without `cuda`.
    """
    by_name = {check.name: check for check in CHECKS}
    # A name of both, xla, is the package after `alone`, and the check elsewhere.
    both = () if "alone" in names else tuple(by_name)
    packages = tuple(name for name in names if name in known_packages and name not in both)
    tried = tuple(name for name in names if name in versions.WORDS)
    unknown = [name for name in names if name not in (*by_name, *packages, *tried)]
    if unknown:
        words = f"; `versions` takes {', '.join(versions.WORDS)}" if "versions" in names else ""
        raise ValueError(f"{unknown[0]!r} is no check; there are {', '.join(by_name)}{words}")
    if packages and "alone" not in names:
        raise ValueError(f"{packages[0]!r} is a package, which only `alone` takes")
    drawn = DRAWN in tried and not {"alone", "xla"}.isdisjoint(names)
    if tried and "versions" not in names and not (drawn and tried == (DRAWN,)):
        raise ValueError(f"{tried[0]!r} is a version, which only `versions` takes")
    if changed_since is not None and "test" not in names:
        raise ValueError("--changed is for `test`: tools/check.py test --changed")
    if dry and "cuda" not in names:
        raise ValueError("--dry is for `cuda`: tools/check.py cuda --dry")
    if not names:
        return tuple(check for check in CHECKS if not check.slow)
    by_name["alone"] = replace(by_name["alone"], run=partial(alone.check, packages=packages, drawn=drawn))
    by_name["cuda"] = replace(by_name["cuda"], run=partial(cuda.check, dry=dry))
    by_name["versions"] = replace(by_name["versions"], run=partial(versions.check, words=tried))
    by_name["xla"] = replace(by_name["xla"], run=partial(xla.check, drawn=drawn))
    by_name["test"] = replace(by_name["test"], run=partial(suite.check, base=changed_since))
    return tuple(check for name, check in by_name.items() if name in names and name not in packages)


def report(outcomes: Sequence[Outcome]) -> str:
    """Every finding under its check's name, then the table of checks."""
    lines: list[str] = []
    for outcome in outcomes:
        if outcome.findings:
            lines += [f"\n{outcome.check.name}", *(f"  {finding}" for finding in outcome.findings)]
    lines += ["", f"{'check':<8} {'result':<14} {'seconds':>8}"]
    lines += [f"{o.check.name:<8} {_result(len(o.findings)):<14} {o.seconds:>8.1f}" for o in outcomes]
    return "\n".join(lines)


def _run(check: Check) -> Outcome:
    print(f"{check.name}: {check.looks_at} ...", flush=True)
    start = time.perf_counter()
    findings = tuple(check.run(ROOT))
    return Outcome(check=check, findings=findings, seconds=time.perf_counter() - start)


def _result(count: int) -> str:
    return {0: "ok", 1: "1 finding"}.get(count, f"{count} findings")


def _described(check: Check) -> str:
    return f"{check.name:<8} {check.looks_at}{' (slow: asked for by name)' if check.slow else ''}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
