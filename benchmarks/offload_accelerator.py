"""A forward on an accelerator whose weights are kept on the host: the link's rate, and what computing hides.

    uv run --group bench python benchmarks/offload_accelerator.py

Layers of one size in bf16. With few items the link decides: the forward is held against a plain copy of the same
bytes from pinned memory. With many items computing decides: it is held against the forward of a model whose weights
are all there. Accelerate's `cpu_offload` beside it. Needs an accelerator.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from rounds import Table, installed, parse_arguments, repeated, report, take_turns
from torch import Tensor, nn

from drivetrain_dispatch import cpu_offload, offload_stats

FEW, MANY = 16, 16_384


def stack(width: int, layers: int) -> nn.Module:
    """Linear layers of random weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    return model.eval()


def forward(model: nn.Module, batch: Tensor) -> Callable[[], Tensor]:
    """One forward, to its end on the device."""

    def call() -> Tensor:
        with torch.inference_mode():
            output = model(batch)
        torch.accelerator.synchronize()
        return output

    return call


def plain_copy(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Copy the weights of a model from pinned memory, into the same memory of the device each time."""
    pinned = [parameter.detach().pin_memory() for parameter in model.parameters()]
    target = torch.empty_like(pinned[0], device=device)

    def call() -> None:
        for source in pinned:
            target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()

    return call


def measure(items: int, width: int, layers: int, rounds: int, device: torch.device) -> Table:
    """The table of one size of batch."""
    batch = torch.randn(items, width, dtype=torch.bfloat16, device=device)
    ours = cpu_offload(stack(width, layers), device)
    calls: dict[str, Callable[[], object]] = {
        "plain copy of the weights": plain_copy(stack(width, layers), device),
        "weights on the accelerator": forward(stack(width, layers).to(device), batch),
        "drivetrain": forward(ours, batch),
    }
    if installed("accelerate"):
        from accelerate import cpu_offload as peer

        calls["Accelerate"] = forward(peer(stack(width, layers), execution_device=device), batch)
    expected = calls["weights on the accelerator"]()
    for name, call in calls.items():
        found = call()
        assert not isinstance(found, Tensor) or torch.equal(found, expected), name
    seconds = take_turns({name: repeated(call, times=3) for name, call in calls.items()}, rounds=rounds)
    print(f"missed: {offload_stats(ours).num_missed}", file=sys.stderr)
    each = zip(seconds["plain copy of the weights"], seconds["weights on the accelerator"], strict=True)
    bound = [max(both) for both in each]
    size = layers * width * width * 2 / 1e9
    title = f"{items} items through {size:.2f} GB of weights"
    return Table(title=title, unit="s", measured={"the slower of copy and compute": bound, **seconds})


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=64)
    chosen, sys.argv[1:] = parser.parse_known_args()
    arguments = parse_arguments(__doc__ or "", rounds=7)
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        sys.exit("this machine has no accelerator: benchmarks/offload.py measures the host")
    device = torch.device(kind.type, 0)
    tables = [measure(items, chosen.width, chosen.layers, arguments.rounds, device) for items in (FEW, MANY)]
    report("offload_accelerator", tables, arguments)


if __name__ == "__main__":
    main()
