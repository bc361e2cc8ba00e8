"""Loading a sharded checkpoint into a model on the meta device, on the CPU: time and memory.

    uv run --group bench python benchmarks/load.py

Four safetensors shards, from the cache and from the disk, as they are and converted. Contestants take turns, each in
a fresh process that has imported all it needs and holds the empty model. What they are held against is a plain read
of the same bytes into one small buffer that is used again and again; to read them into memory of their own takes
longer, since the system must find and clear it, so that this is shown too. safetensors' own `load_file` leaves the
weights in the files, as Accelerate does where dtypes stay; it is timed until their pages have been touched. Memory
is what the process itself takes, without pages of files, at most, beyond what it had before.

Then a Llama that transformers saved, loaded by its `from_pretrained` and by drivetrain, with what builds the empty
model, all in one process: until the weights have been touched, or until a first forward is over.
"""

import argparse
import gc
import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from plain_files import bytes_of, evict, level_memory
from rounds import RESULTS, Table, installed, repeated, report, take_turns
from safetensors.torch import load_file, save_file
from torch import nn

from drivetrain_dispatch import init_empty_weights, load_checkpoint_and_dispatch
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model

WIDTH, VOCABULARY, NUM_SHARDS = 4096, 32_000, 4
BUFFER_BYTES = 8 * 2**20
LLAMA_WIDTH = 2048
PLAIN = "plain read into one buffer"
PRETRAINED = (
    "from_pretrained",
    "drivetrain, cpu",
    "from_pretrained and a forward",
    "drivetrain, cpu and a forward",
    "drivetrain, disk and a forward",
)
POLL_SECONDS = 0.005


def empty_model(num_layers: int, dtype: torch.dtype) -> nn.Module:
    """An embedding and layers, without memory."""
    with init_empty_weights():
        layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(num_layers))
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, dtype=dtype), *layers)


def num_layers_of(size_bytes: float, dtype: torch.dtype) -> int:
    """Layers of a model of about as many bytes, at least one a shard."""
    layer_bytes = WIDTH * WIDTH * dtype.itemsize
    return max(NUM_SHARDS, round((size_bytes - VOCABULARY * WIDTH * dtype.itemsize) / layer_bytes))


def write_checkpoint(folder: Path, num_layers: int, dtype: torch.dtype) -> None:
    """Shards and their index, of random numbers."""
    names = list(empty_model(num_layers, dtype).state_dict())
    files = {
        name: f"model-{index * NUM_SHARDS // len(names)}.safetensors" for index, name in enumerate(names)
    }
    for file in dict.fromkeys(files.values()):
        tensors = {
            name: torch.rand(VOCABULARY if name == names[0] else WIDTH, WIDTH, dtype=torch.float32).to(dtype)
            for name, own in files.items()
            if own == file
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def shards(folder: Path) -> list[Path]:
    """The files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def read_plainly(folder: Path) -> None:
    """Read all shards into one buffer."""
    buffer = bytearray(BUFFER_BYTES)
    for path in shards(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_into_memory(folder: Path) -> list[torch.Tensor]:
    """Read all shards into memory of their own."""
    held: list[torch.Tensor] = []
    for path in shards(folder):
        held.append(torch.empty(path.stat().st_size, dtype=torch.uint8))
        content = bytes_of(held[-1])
        with path.open("rb", buffering=0) as file:
            for start in range(0, len(content), BUFFER_BYTES):
                file.readinto(content[start : start + BUFFER_BYTES])
    return held


def map_and_touch(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Load by safetensors' own function, and have all pages of the files there."""
    held = [load_file(path) for path in shards(folder)]
    for tensors in held:
        for tensor in tensors.values():
            tensor.view(-1).view(torch.uint8)[::4096].sum()
    return held


def llama(folder: Path, size_bytes: float) -> None:
    """A Llama of about as many bytes in bfloat16, as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layer_bytes = 2 * LLAMA_WIDTH**2 * (4 + 3 * 3)
    config = LlamaConfig(hidden_size=LLAMA_WIDTH, intermediate_size=3 * LLAMA_WIDTH, vocab_size=VOCABULARY)
    config.num_attention_heads = config.num_key_value_heads = LLAMA_WIDTH // 64
    config.num_hidden_layers = max(1, round((size_bytes - 4 * VOCABULARY * LLAMA_WIDTH) / layer_bytes))
    config.dtype = torch.bfloat16
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.05, 0.05)
    model.save_pretrained(folder, max_shard_size="500MB")


def pretrained(name: str, folder: Path) -> Callable[[], Any]:
    """What a contestant does that loads transformers' model."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    place = "disk" if "disk" in name else "cpu"
    tokens = torch.zeros(1, 4, dtype=torch.long)

    def theirs() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def ours() -> nn.Module:
        with init_empty_weights():
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).to(torch.bfloat16).eval()
        return load_checkpoint_and_dispatch(model, folder, {"": place}, strict=False)

    def call() -> nn.Module:
        model = theirs() if name.startswith("from_pretrained") else ours()
        with torch.inference_mode():
            if name.endswith("forward"):
                model(tokens)
            else:
                for parameter in model.parameters():
                    parameter.view(-1)[::2048].sum()
        return model

    return call


def contestant(
    name: str, folder: Path, num_layers: int, stored: torch.dtype, dtype: torch.dtype
) -> Callable[[], Any]:
    """What a contestant does, with all it needs imported and built."""
    if name == PLAIN:
        return lambda: read_plainly(folder)
    if name == "plain read into memory":
        return lambda: read_into_memory(folder)
    if name == "safetensors load_file, touched":
        return lambda: map_and_touch(folder)
    model = empty_model(num_layers, stored)
    if name == "drivetrain":
        return lambda: load_checkpoint_in_model(model, folder, {"": "cpu"}, dtype=dtype)
    if name == "drivetrain, one thread":
        return lambda: load_checkpoint_in_model(model, folder, {"": "cpu"}, dtype=dtype, num_threads=1)
    from accelerate import load_checkpoint_in_model as load_by_peer

    return lambda: load_by_peer(model, str(folder), device_map={"": "cpu"}, dtype=dtype)


def work(arguments: argparse.Namespace) -> None:
    """A contestant's process: get ready, wait to be told to begin, and say how long it took."""
    dtypes = (getattr(torch, arguments.stored), getattr(torch, arguments.dtype))
    call = contestant(arguments.worker, arguments.folder, arguments.layers, *dtypes)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    held = call()
    print(time.perf_counter() - start, flush=True)
    sys.stdin.readline()
    del held


def own_bytes(process_id: int) -> int:
    """What a process holds of memory of its own."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def run(command: list[str], before: Callable[[], object]) -> tuple[float, int]:
    """The seconds of a contestant's turn, and the most memory it took meanwhile."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        before()
        most = first = own_bytes(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        descriptor = process.stdout.fileno()
        while not select.select([descriptor], [], [], POLL_SECONDS)[0]:
            most = max(most, own_bytes(process.pid))
        seconds = float(process.stdout.readline())
        most = max(most, own_bytes(process.pid))
        process.stdin.write(b"\n")
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds, most - first


def measure(
    title: str, folder: Path, case: Mapping[str, str], *, cold: bool, arguments: argparse.Namespace
) -> list[Table]:
    """The tables of one case: time and memory."""
    names = [
        PLAIN,
        "plain read into memory",
        "safetensors load_file, touched",
        "drivetrain",
        "drivetrain, one thread",
    ]
    if installed("accelerate"):
        names.append("Accelerate")
    if case["stored"] != case["dtype"]:
        names.remove("plain read into memory")
        names.remove("safetensors load_file, touched")
    taken: dict[str, list[float]] = {name: [] for name in names}
    size_bytes = sum(path.stat().st_size for path in shards(folder))

    def before() -> None:
        level_memory(size_bytes)
        evict(folder) if cold else read_plainly(folder)

    def turn(name: str) -> Callable[[], float]:
        words = [sys.executable, sys.argv[0], "--worker", name, "--folder", str(folder)]
        words += [word for key, value in case.items() for word in (f"--{key}", value)]

        def call() -> float:
            seconds, most = run(words, before)
            taken[name].append(most)
            return seconds

        return call

    seconds = take_turns({name: turn(name) for name in names}, rounds=arguments.rounds)
    placed = size_bytes * getattr(torch, case["dtype"]).itemsize / getattr(torch, case["stored"]).itemsize
    memory: dict[str, list[float]] = {"what is placed": [placed] * arguments.rounds}
    memory |= {
        name: each[-arguments.rounds :] for name, each in taken.items() if not name.startswith("plain")
    }
    return [
        Table(title=title, unit="s", measured=seconds),
        Table(title=f"{title}: peak memory", unit="MB", measured=memory),
    ]


def measure_llama(arguments: argparse.Namespace) -> list[Table]:
    """The tables of a model of transformers, from the disk and from the cache."""
    tables: list[Table] = []
    with tempfile.TemporaryDirectory(dir=arguments.disk) as name:
        folder = Path(name)
        llama(folder, arguments.gigabytes * 1e9)
        calls: dict[str, Callable[[], Any]] = {PLAIN: lambda: read_plainly(folder)}
        calls |= {name: pretrained(name, folder) for name in PRETRAINED}
        for place, before in {"disk": evict, "cache": read_plainly}.items():

            def ready(before: Callable[[Path], object] = before) -> None:
                gc.collect()
                before(folder)
                time.sleep(arguments.pause)

            turns = {name: repeated(call, times=1, before=ready) for name, call in calls.items()}
            seconds = take_turns(turns, rounds=arguments.rounds)
            title = f"A Llama of {arguments.gigabytes:g} GB, from the {place}"
            tables.append(Table(title=title, unit="s", measured=seconds))
    return tables


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--gigabytes", type=float, default=8, help="size of the checkpoint")
    parser.add_argument(
        "--only", default="", help="only the cases whose title has this, such as 'from the disk'"
    )
    parser.add_argument(
        "--disk", type=Path, help="a folder on the disk to measure; by default that of temporary files"
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=0,
        help="seconds before a turn: a disk that is rented may save up its rate",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stored", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    tables: list[Table] = []
    for stored in ("bfloat16", "float32"):
        converted = "" if stored == "bfloat16" else " to bfloat16"
        titles = {
            cold: f"{arguments.gigabytes:g} GB of {stored}{converted}, from the {'disk' if cold else 'cache'}"
            for cold in (False, True)
        }
        if not any(arguments.only in title for title in titles.values()):
            continue
        with tempfile.TemporaryDirectory(dir=arguments.disk) as name:
            folder = Path(name)
            num_layers = num_layers_of(arguments.gigabytes * 1e9, getattr(torch, stored))
            write_checkpoint(folder, num_layers, getattr(torch, stored))
            case = {"stored": stored, "dtype": "bfloat16", "layers": str(num_layers)}
            for cold, title in titles.items():
                if arguments.only in title:
                    tables += measure(title, folder, case, cold=cold, arguments=arguments)
    if installed("transformers") and arguments.only in "A Llama":
        tables += measure_llama(arguments)
    report("load", tables, arguments)


if __name__ == "__main__":
    main()
