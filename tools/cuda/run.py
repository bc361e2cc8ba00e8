"""Tests and benchmarks on a card, in the Python and torch that are there: `python tools/cuda/run.py [HALF ...]`.

It needs torch and pytest, installs nothing and asks no network. The halves, `tests` and `benchmarks`, each end within
their minutes. Both begin with what has never passed on a card, and write logs and tables as they go: a run that is
cut off keeps what it had. With `--dry` no card is needed: the tests run on the simulated device and name those that
only a card can show, and the benchmarks run at sizes of a second.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from source_path import requirements, source_path

ROOT = Path(__file__).resolve().parents[2]
HALVES = ("tests", "benchmarks")
MINUTES = 8.0
# What tests and benchmarks use beside what the packages declare; each is named if it is missing.
OPTIONAL = (
    "accelerate", "bitsandbytes", "deepspeed", "lightning", "peft", "pynvml", "torchao", "transformer_engine",
    "transformers", "triton",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the halves that are asked for; return 1 if anything failed, 2 if there is no card to run on."""
    parser = argparse.ArgumentParser(
        prog="tools/cuda/run.py", description="Test and measure on a CUDA device."
    )
    parser.add_argument(
        "halves", nargs="*", metavar="HALF", help=f"{' or '.join(HALVES)}; both if none is named"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cuda", help="folder of logs and tables")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="after which a half begins nothing more"
    )
    parser.add_argument("--dry", action="store_true", help="without a card: what can be played anywhere")
    options = parser.parse_args(arguments)
    if unknown := [half for half in options.halves if half not in HALVES]:
        parser.error(f"{unknown[0]!r} is no half; there are {' and '.join(HALVES)}")
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    variables = environment(out)
    facts = ask_facts(variables)
    print(described(facts), flush=True)
    (out / "machine.json").write_text(json.dumps(facts, indent=2) + "\n")
    if not facts["cards"] and not options.dry:
        print(
            "no CUDA device that torch can use: nothing was run; --dry plays what needs none", file=sys.stderr
        )
        return 2
    codes = {
        half: run_half(
            half, out, variables, minutes=options.minutes, missing=facts["missing"], dry=options.dry
        )
        for half in HALVES
        if half in (options.halves or HALVES)
    }
    for half, code in codes.items():
        print(f"{half}: {'passed' if code == 0 else f'exit code {code}'}; logs and tables are in {out}")
    return int(any(codes.values()))


def environment(out: Path) -> dict[str, str]:
    """The variables of what runs here: the packages' sources, and where to write."""
    path = [*source_path(ROOT, out / "metadata"), ROOT / "tests"]
    before = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *([before] if before else [])]),
        "PYTHONUNBUFFERED": "1",
    }


def ask_facts(variables: Mapping[str, str]) -> dict[str, Any]:
    """The versions, cards and missing libraries, as a process with torch finds them."""
    command = [sys.executable, str(Path(__file__).with_name("machine.py")), *requirements(ROOT), *OPTIONAL]
    path = os.pathsep.join([str(ROOT / "benchmarks" / "cuda"), variables["PYTHONPATH"]])
    done = subprocess.run(
        command, env={**variables, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"torch could not be asked what is there:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def described(facts: Mapping[str, Any]) -> str:
    """The facts as lines for people."""
    return (
        f"Python {facts['python']}, torch {facts['torch']}\n"
        f"cards: {', '.join(facts['cards']) or 'none'}\n"
        f"missing, and what needs it is skipped: {', '.join(facts['missing']) or 'nothing'}"
    )


def run_half(
    half: str,
    out: Path,
    variables: Mapping[str, str],
    *,
    minutes: float,
    missing: Sequence[str],
    dry: bool,
) -> int:
    """Run a half as a process of its own, with its output here and in its log; return its exit code."""
    if half == "tests":
        own = ["-m", "pytest", "-c", str(ROOT / "tools" / "cuda" / "pytest.ini"), "--rootdir", str(ROOT)]
        own += ["--confcutdir", str(ROOT / "tests" / "hardware"), "-v", "-rs", "-p", "card_session"]
        own += ["--card-out", str(out), "--card-minutes", f"{minutes:g}", "--card-missing", ",".join(missing)]
        own += ["-m", "not slow" if dry else "cuda", str(ROOT / "tests" / "hardware")]
        variables = {
            **variables,
            "PYTHONPATH": f"{ROOT / 'tools' / 'cuda'}{os.pathsep}{variables['PYTHONPATH']}",
        }
    else:
        own = [str(ROOT / "benchmarks" / "cuda" / "run.py"), "--out", str(out / "benchmarks")]
        own += ["--seconds", f"{60 * minutes:g}"]
        own += ["--device", "cpu", "--dry"] if dry else ["--device", "cuda"]
    begin = time.monotonic()
    with (out / f"{half}.log").open("w") as log:
        running = subprocess.Popen(
            [sys.executable, *own], cwd=ROOT, env=dict(variables), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert running.stdout is not None
        for line in running.stdout:
            for place in (sys.stdout, log):
                place.write(line)
                place.flush()
        code = running.wait()
    print(f"{half}: {time.monotonic() - begin:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
