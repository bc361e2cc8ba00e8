"""What a call of a notebook's function on two processes costs: a first one, and a second one.

uv run --group bench python benchmarks/notebook.py

Each contestant's session is a process of its own, which has imported torch, as a notebook has.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rounds import Table, installed, parse_arguments, report, take_turns

# A session prints the seconds of its first and of its second call. The function is in a module, which
# torch.multiprocessing.spawn needs, as it ships no function of `__main__`'s interactive part.
SESSION = """
import json, os, sys, time
import torch
sys.path.insert(0, {folder!r})
from empty_function import on_rank, spawned
{setup}

def turn():
    start = time.perf_counter()
    {call}
    return time.perf_counter() - start

if __name__ == "__main__":
    begin = time.perf_counter()
    {begin}
    begun = time.perf_counter() - begin
    first = begun + turn()
    second = turn()
    {end}
    print(json.dumps([first, second]))
"""
FUNCTION = """
import torch

def on_rank():
    torch.ones(1)

def spawned(rank):
    on_rank()
"""
# Setup, before the first call (counted with it), the call, and after the last one.
SESSIONS = {
    "torch.multiprocessing.spawn": (
        "from torch.multiprocessing import spawn",
        "pass",
        "spawn(spawned, nprocs=2)",
        "pass",
    ),
    "debug_launcher": (
        "from drivetrain_launcher import debug_launcher",
        "pass",
        "debug_launcher(on_rank, num_processes=2)",
        "pass",
    ),
    "Workers(2).run": (
        "from drivetrain_launcher import Workers",
        "workers = Workers(2, cpu=True)",
        "workers.run(on_rank)",
        "workers.close()",
    ),
}
# By its public interface; it forks, and refuses to once the notebook has used CUDA.
PEER = (
    "from accelerate import debug_launcher as peer",
    "pass",
    "peer(on_rank, num_processes=2)",
    "pass",
)


def session(parts: tuple[str, str, str, str], folder: Path) -> tuple[float, float]:
    """Run a session; return the seconds of its first and of its second call."""
    setup, begin, call, end = parts
    script = folder / "session.py"
    script.write_text(SESSION.format(folder=str(folder), setup=setup, begin=begin, call=call, end=end))
    done = subprocess.run([sys.executable, str(script)], check=True, stdout=subprocess.PIPE, text=True)
    first, second = json.loads(done.stdout.splitlines()[-1])
    return first, second


def contestants(folder: Path, seconds: dict[str, list[float]]) -> dict[str, Callable[[], float]]:
    """The contestants; each turn is a session, whose second call is appended to `seconds`."""
    sessions = dict(SESSIONS)
    if installed("accelerate"):
        sessions["accelerate's debug_launcher (forks)"] = PEER

    def turn_of(name: str) -> Callable[[], float]:
        def turn() -> float:
            first, second = session(sessions[name], folder)
            seconds.setdefault(name, []).append(second)
            return first

        return turn

    return {name: turn_of(name) for name in sessions}


def main() -> None:
    """Time every contestant."""
    from tempfile import TemporaryDirectory

    arguments = parse_arguments(__doc__ or "", rounds=7)
    seconds: dict[str, list[float]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "empty_function.py").write_text(FUNCTION)
        first = take_turns(contestants(folder, seconds), rounds=arguments.rounds)
    second = {name: seconds[name][-arguments.rounds :] for name in first}
    report(
        "notebook",
        [
            Table(title="First call of a function on two processes", unit="s", measured=first),
            Table(title="Second call", unit="s", measured=second),
        ],
        arguments,
        note="Fresh interpreters import torch; forks inherit it, but not a used GPU, nor threads.",
    )


if __name__ == "__main__":
    main()
