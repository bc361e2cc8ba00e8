"""What the policy of dtypes costs a training step: a small MLP on the CPU, one process, one thread.

    uv run --group bench python benchmarks/dtype_policy.py

The first table is of a tiny model, where the added calls count; the second of one with 4 million parameters, where
the arithmetic of rounding does. The plain loop in bf16 steps torch's AdamW on weights in bf16, and so loses small
updates.
"""

from collections.abc import Callable

import torch
from rounds import Table, parse_arguments, repeated, report, take_turns
from torch import Tensor, nn

Step = Callable[[], None]


class Mlp(nn.Module):
    """Two layers with a norm between them; (items, width) to (items, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return self.last(self.norm(self.first(x)))


def plain_step(width: int, dtype: torch.dtype) -> Step:
    """PyTorch alone, on weights of one dtype."""
    model = Mlp(width).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(8, width, dtype=dtype)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def drivetrain_step(width: int, precision: dict[str, object]) -> Step:
    """The loop of drivetrain with a `precision` section."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, sections={"precision": precision, "run": {"show_plan": False}})
    model = Mlp(width)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    x = torch.randn(8, width)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return step


def main() -> None:
    """Time the steps of a tiny and of a larger model."""
    arguments = parse_arguments(__doc__, rounds=21)
    torch.set_num_threads(1)
    held = {"param_dtype": "bf16"}
    tables: list[Table] = []
    for width, times in ((32, 50), (1448, 1)):
        makers: dict[str, Callable[[], Step]] = {
            "plain, fp32": lambda width=width: plain_step(width, torch.float32),
            "drivetrain, fp32, no policy": lambda width=width: drivetrain_step(width, {}),
            "drivetrain, fp32, outputs cast and the norm kept": lambda width=width: drivetrain_step(
                width, {"output_dtype": "fp32", "keep_fp32": ("norm",)}
            ),
            "plain, bf16": lambda width=width: plain_step(width, torch.bfloat16),
            **{
                f"drivetrain, bf16, {update}": lambda width=width, update=update: drivetrain_step(
                    width, {**held, "weight_update": update}
                )
                for update in ("nearest", "stochastic", "kahan")
            },
            "drivetrain, bf16, kahan, the norm kept": lambda width=width: drivetrain_step(
                width, {**held, "keep_fp32": ("norm",)}
            ),
        }
        turns = {name: repeated(make(), times=times) for name, make in makers.items()}
        title = f"One step of AdamW, {2 * width * (width + 1) + 2 * width:,} parameters"
        tables.append(Table(title=title, unit="us", measured=take_turns(turns, rounds=arguments.rounds)))
    report("dtype_policy", tables, arguments)


if __name__ == "__main__":
    main()
