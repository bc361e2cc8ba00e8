"""A model of transformers from its folder, by `load_pretrained` and by transformers' own `from_pretrained`.

    uv run --group bench python benchmarks/load_pretrained.py

A decoder, and a mixture of experts whose experts lie one by one in the file and stacked in the model; in memory, and
on the disk, where stacked experts are written to a folder first and found there by later loads. Contestants take
turns, each in a fresh process that has imported all it needs. `from_pretrained` takes a device map with Accelerate
installed. "Trained" is until each weight in memory was written to, as by an optimizer's step. Memory is what the
process itself takes, without pages of files, at most, beyond what it had before.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from load import run
from plain_files import evict, level_memory
from rounds import RESULTS, Table, report, take_turns

OURS, THEIRS = "drivetrain", "from_pretrained"
OFFLOAD = "offload"


def config_of(kind: str, gigabytes: float) -> Any:
    """The configuration of a model of about so many bytes in bf16."""
    import transformers

    width, vocabulary = 1024, 32_000
    shared: dict[str, Any] = {
        "hidden_size": width, "vocab_size": vocabulary, "num_attention_heads": 16, "num_key_value_heads": 4,
    }  # fmt: skip
    numel = gigabytes * 1e9 / 2 - 2 * width * vocabulary
    if kind == "decoder":
        layer = 2.5 * width**2 + 3 * width * 4096
        return transformers.LlamaConfig(
            **shared, intermediate_size=4096, num_hidden_layers=max(1, round(numel / layer))
        )
    layer = 2.5 * width**2 + 32 * 3 * width * 1024
    return transformers.MixtralConfig(
        **shared, intermediate_size=1024, num_local_experts=32, num_hidden_layers=max(1, round(numel / layer))
    )


def write_checkpoint(folder: Path, kind: str, gigabytes: float) -> None:
    """Write a model of random weights, in four files and more."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, gigabytes), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=f"{max(1, round(gigabytes * 250))}MB")


def contestant(name: str, folder: Path) -> Callable[[], Any]:
    """What a contestant does, with all it needs imported."""
    import transformers

    who, _, where = name.partition(", ")
    place = "disk" if where.startswith("disk") else "cpu"
    if where.endswith("trained"):
        load = contestant(f"{who}, memory", folder)
        return lambda: trained(load())
    model_class = transformers.AutoModelForCausalLM
    with torch.device("meta"):  # imports the module of the model
        model_class.from_config(transformers.AutoConfig.from_pretrained(folder))
    if who == THEIRS:
        import accelerate.big_modeling  # noqa: F401 what it would import meanwhile

        return lambda: model_class.from_pretrained(
            folder, device_map={"": place}, offload_folder=folder / OFFLOAD, dtype=torch.bfloat16
        )
    from drivetrain_dispatch import load_pretrained

    return lambda: load_pretrained(
        model_class, folder, device_map={"": place}, offload_folder=folder / OFFLOAD
    )


def trained(model: Any) -> Any:
    """Write to each weight of a model, and return it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3)
    return model


def work(arguments: argparse.Namespace) -> None:
    """Be a contestant's process: get ready, wait to be told to begin, and say how long it took."""
    call = contestant(arguments.worker, arguments.folder)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    held = call()
    print(time.perf_counter() - start, flush=True)
    sys.stdin.readline()
    del held


def measure(title: str, folder: Path, *, cold: bool, arguments: argparse.Namespace) -> list[Table]:
    """The tables of one checkpoint: time and memory."""
    names = [f"{who}, {where}" for where in ("memory", "memory, trained", "disk") for who in (THEIRS, OURS)]
    names.append(f"{OURS}, disk again")  # what was converted is there
    taken: dict[str, list[float]] = {name: [] for name in names}
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    def turn(name: str) -> Callable[[], float]:
        def before() -> None:
            level_memory(size_bytes)
            evict(folder) if cold else [path.read_bytes() for path in folder.glob("*.safetensors")]

        def call() -> float:
            if not name.endswith("again"):
                shutil.rmtree(folder / OFFLOAD, ignore_errors=True)
            words = [sys.executable, sys.argv[0], "--worker", name, "--folder", str(folder)]
            if name.endswith("again"):
                run(words, before)
            seconds, most = run(words, before)
            taken[name].append(most)
            return seconds

        return call

    seconds = take_turns({name: turn(name) for name in names}, rounds=arguments.rounds)
    memory = {name: each[-arguments.rounds :] for name, each in taken.items()}
    return [
        Table(title=title, unit="s", measured=seconds),
        Table(title=f"{title}: peak memory", unit="MB", measured=memory),
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, after one that does not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the checkpoint")
    parser.add_argument("--only", default="", help="only the cases whose title has this")
    parser.add_argument(
        "--disk", type=Path, help="a folder on the disk to measure; by default that of temporary files"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    tables: list[Table] = []
    for kind in ("decoder", "mixture of experts"):
        with tempfile.TemporaryDirectory(dir=arguments.disk) as name:
            write_checkpoint(Path(name), kind, arguments.gigabytes)
            for cold in (False, True):
                title = f"{kind}, {arguments.gigabytes:g} GB, from the {'disk' if cold else 'cache'}"
                if arguments.only in title:
                    tables += measure(title, Path(name), cold=cold, arguments=arguments)
    report("load_pretrained", tables, arguments)


if __name__ == "__main__":
    main()
