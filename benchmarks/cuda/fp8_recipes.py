"""A training step of layers 4096 wide in fp8, by each recipe that the card and the libraries can run, beside bf16."""

import warnings

from bench import Goal, Table, begin
from fp8 import NOTE, Layers, contestants

BLOCKS = 2  # of 134 million parameters
BASE, GOAL, MOST = "bf16", "torchao_rowwise", 1 / 1.2  # of bf16's time


def main() -> None:
    """Time every recipe; all is compiled that is meant to be."""
    bench = begin(__doc__ or "", rounds=9)
    there = [library for library in ("torchao", "Transformer Engine") if bench.has(library)]
    if not there:
        bench.finish()
        return
    full = Layers(width=4096, depth=BLOCKS, tokens=16_384, device=bench.device, compiler="inductor")
    layers = bench.sized(full, Layers(width=64, depth=BLOCKS, tokens=32, device=bench.device))
    makers = dict(contestants(layers))
    first = {name: makers.pop(name) for name in (BASE, GOAL) if name in makers}  # each compiles for a while
    steps = bench.made({**first, **makers})
    bench.tell(NOTE)
    table = Table(
        title=f"A step of {BLOCKS} feed-forward blocks of {layers.width} features, {layers.tokens:,} tokens",
        unit="ms", measured={}, digits=3, rates={"tokens/s": float(layers.tokens)},
        goals=[Goal(of=GOAL, beside=BASE, most=MOST)],
    )  # fmt: skip
    bench.measure(table, bench.turns(steps, times=bench.sized(5, 1)))
    bench.finish()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*Enum subclass.*")
    main()
