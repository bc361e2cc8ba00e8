"""Train a small byte-level GPT on the source code of Python's own standard library.

Nothing is downloaded: every machine that runs Python has the text. The same file, unchanged, runs anywhere:

    python examples/train_bytes.py                              # one process, on the CPU or the GPU
    drivetrain launch --num-processes 2 examples/train_bytes.py
    drivetrain launch --num-processes 8 --mixed-precision bf16 examples/train_bytes.py --width 768 --layers 12
    drivetrain launch --num-processes 2 --parallel-pipeline 2 examples/train_bytes.py

Ctrl-C saves and stops; the same command with --resume goes on, also on another number of processes.
"""

import argparse
import itertools
import json
import math
import os
import signal
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from drivetrain import Accelerator

REPORT_EVERY = 10  # steps between looks at the loss and at Ctrl-C: both make the ranks, and a GPU, wait


def write_tokens(directory: Path) -> None:
    """Write the standard library into train.bin and validation.bin; every twentieth file is for validation."""
    if (directory / "validation.bin").exists():
        return
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    files = [file for file in sorted(root.rglob("*.py")) if skipped.isdisjoint(file.relative_to(root).parts)]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "train.bin").write_bytes(b"".join(f.read_bytes() for i, f in enumerate(files) if i % 20))
    (directory / "validation.bin").write_bytes(b"".join(f.read_bytes() for f in files[::20]))


def read_windows(file: Path, block_size: int) -> np.ndarray:
    """The bytes of a file in rows of shape (block_size + 1,), memory-mapped: a dataset as it stands."""
    tokens = np.memmap(file, dtype=np.uint8, mode="c")  # copy on write: torch wants memory it may write to
    num_windows = len(tokens) // (block_size + 1)
    return tokens[: num_windows * (block_size + 1)].reshape(num_windows, block_size + 1)


class Block(nn.Module):
    """A pre-norm transformer block: (batch, length, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // 32)
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (self.query_key_value, self.mlp_in):
            nn.init.normal_(layer.weight, std=width**-0.5)
        for layer in (self.attended, self.mlp_out):
            nn.init.zeros_(layer.weight)  # a new block changes nothing, which speeds up the first steps

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and then the perceptron make of x."""
        heads = self.query_key_value(self.norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes of shape (batch, length) to logits of the byte after each, of shape (batch, length, 256)."""

    def __init__(self, *, block_size: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.byte = nn.Embedding(256, width)
        self.position = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, 256, bias=False)
        self.logits.weight = self.byte.weight  # a byte's embedding is also what it is recognised by
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits."""
        x = self.byte(tokens) + self.position.weight[: tokens.shape[1]]
        return self.logits(self.norm(self.blocks(x)))


def window_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean loss of each window, in nats a byte, of shape (batch,)."""
    windows = windows.long()
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).mean(1)


def mean_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """The loss to train by. Every window has as many bytes; where counts differ, return a sum and its count."""
    return window_losses(model, windows).mean()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Iterable[Tensor]) -> float:
    """The mean loss over every validation window, each counted once. Called on all ranks."""
    model.eval()
    losses = [accelerator.gather_for_metrics(window_losses(model, batch)) for batch in loader]
    model.train()
    return torch.cat(losses).mean().item()


def make_loaders(accelerator: Accelerator, args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """The loaders of training and validation, not yet sharded over ranks. Called on all ranks."""
    with accelerator.main_process_first():
        write_tokens(args.project_dir / "data")
    windows = read_windows(args.project_dir / "data" / "train.bin", args.block_size)
    unseen = read_windows(args.project_dir / "data" / "validation.bin", args.block_size)
    unseen = unseen[:: math.ceil(len(unseen) / args.validation_windows)]
    loader = DataLoader(windows, args.batch_size, shuffle=True, drop_last=True)
    return loader, DataLoader(unseen, args.batch_size)


def make_model(args: argparse.Namespace) -> tuple[GPT, AdamW, LambdaLR]:
    """The model and what trains it; the learning rate warms up and decays in optimizer steps."""
    model = GPT(block_size=args.block_size, width=args.width, num_layers=args.layers)
    optimizer = AdamW(model.parameters(), args.learning_rate, betas=(0.9, 0.99), weight_decay=0.1)

    def factor(step: int) -> float:
        return min((step + 1) / 40, 0.525 + 0.475 * math.cos(math.pi * min(1, step / args.steps)))

    return model, optimizer, LambdaLR(optimizer, factor)


def train(accelerator: Accelerator, args: argparse.Namespace) -> GPT | None:
    """Train, or go on training. Called on all ranks; returns the model, or None where Ctrl-C came first."""
    loader, validation = accelerator.prepare(*make_loaders(accelerator, args))
    model, _, scheduler = accelerator.prepare(*make_model(args))
    step = accelerator.load_state() if args.resume else 0
    accelerator.init_trackers("train_bytes", {name: str(value) for name, value in vars(args).items()})
    for stopping in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stopping, lambda *_: accelerator.set_trigger())

    losses: list[Tensor] = []
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    with show_progress(accelerator, step, args.steps) as progress:
        say = accelerator.on_main_process(progress.console.print)
        while step < args.steps:
            # Backward, clipping and the steps of optimizer and scheduler in one call, which every backend has.
            losses.append(accelerator.train_step(next(batches), loss=mean_loss, max_norm=1.0).loss)
            if not accelerator.sync_gradients:
                continue  # --gradient-accumulation-steps of the launcher: no step yet

            step += 1
            save, stop = step % args.save_every == 0 or step == args.steps, False
            if save or step % REPORT_EVERY == 0:
                train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                losses.clear()
                accelerator.log({"train loss": train_loss, "learning rate": scheduler.get_last_lr()[0]}, step)
                progress.update(progress.task_ids[0], completed=step, loss=train_loss)
                stop = accelerator.check_trigger()
            if save or stop:
                validation_loss = evaluate(accelerator, model, validation)
                accelerator.log({"validation loss": validation_loss}, step)
                path = os.path.relpath(accelerator.save_state())
                say(
                    f"step {step}: train loss {train_loss:.3f}, validation loss {validation_loss:.3f}, saved {path}"
                )
            if stop and step < args.steps:
                say("stopped; the same command with --resume goes on from here")
                return None
    return accelerator.unwrap_model(model)


@torch.no_grad()
def sample(model: GPT, prompt: bytes, *, num_bytes: int, temperature: float) -> str:
    """What the model writes after a prompt."""
    tokens = torch.tensor([list(prompt)], device=model.byte.weight.device)
    for _ in range(num_bytes):
        logits = model(tokens[:, -model.block_size :])[:, -1].float()
        tokens = torch.cat([tokens, torch.multinomial((logits / temperature).softmax(-1), 1)], dim=1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def show_progress(accelerator: Accelerator, done: int, total: int) -> Progress:
    """A live bar on rank 0's terminal; where standard error is no terminal, only what is said above it."""
    console = Console(stderr=True, soft_wrap=True)
    columns = *Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}")
    shown = accelerator.is_main_process and console.is_terminal
    progress = Progress(*columns, console=console, disable=not shown)
    progress.add_task("training", completed=done, total=total, loss=math.nan)
    return progress


def plot_losses(log: Path, image: Path) -> None:
    """Draw the losses of a log, across every stop and resume."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, marker in (("train loss", ""), ("validation loss", "o")):
        curve = {r["step"]: r[name] for r in records if name in r}  # of a step done twice, the later counts
        axes.plot(list(curve), list(curve.values()), marker=marker, label=name)
    axes.set(xlabel="optimizer step", ylabel="nats a byte", title="Learning Python's standard library")
    axes.legend()
    figure.savefig(image, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's standard library.")
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="optimizer steps")
    add("--batch-size", type=int, default=16, help="windows in a batch, over all processes together")
    add("--block-size", type=int, default=128, help="bytes in a window")
    add("--width", type=int, default=128, help="size of the hidden state, a multiple of 32")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--learning-rate", type=float, default=3e-3, help="the highest learning rate")
    add("--validation-windows", type=int, default=500, help="windows to evaluate on, at most")
    add("--save-every", type=int, default=200, help="steps between checkpoints, each with an evaluation")
    add("--project-dir", type=Path, default=Path("runs/bytes"), help="where everything is written")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--seed", type=int, default=0, help="seed of weights, data order and sample")
    args = parser.parse_args()
    if not args.resume and (args.project_dir / "checkpoints").exists():
        parser.error(f"{args.project_dir} holds a run: go on with --resume, or give another --project-dir")
    return args


def main() -> None:
    """Train; then show what was learnt."""
    args = parse_arguments()
    # split_batches: --batch-size is that of all processes together, so a run is the same on any number of them.
    with Accelerator(
        seed=args.seed, project_dir=args.project_dir, log_with="jsonl", data={"split_batches": True}
    ) as accelerator:
        model = train(accelerator, args)
        # Every rank samples: a backend that shards the model computes its forward on all ranks together.
        text = "" if model is None else sample(model, b"class ", num_bytes=500, temperature=0.6)
        if model is not None and accelerator.is_main_process:
            plot_losses(args.project_dir / "log.jsonl", args.project_dir / "loss.png")
            print(text)
            print(f"\nThe loss curve, the log and the checkpoints are in {args.project_dir}.")
    if model is None:
        raise SystemExit(
            128 + signal.SIGINT
        )  # what comes after this run in a script must not take it for done


if __name__ == "__main__":
    main()
