"""A forward of a model that has twice its budget on the card, and of one that is kept on the host altogether.

Layers of one size in bf16. With few items the link decides, with many the products: each forward is held against the
slower of two things that are measured alone, a plain copy of the same bytes from pinned memory and the forward of a
model whose weights are all there. A dry run keeps the rest on the disk in place of the host.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bench import Bench, Goal, Measured, Table, begin
from torch import Tensor, nn

from drivetrain_dispatch import Bandwidths, cpu_offload, dispatch_model, infer_auto_device_map, offload_stats

WIDTH, LAYERS = 4096, 64  # 2.15 GB
FEW, MANY = 16, 16_384
COPY, COMPUTE = "plain copy of what is offloaded", "weights on the card"
BOUND = "the slower of copy and compute"
GOALS = (
    Goal(of="drivetrain", beside=BOUND, most=1.1),
    Goal(of="drivetrain", beside="Accelerate", most=1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to keep weights.

    Attributes:
        title: What is kept where.
        budgets: The bytes of each device; None where everything is kept on the host.
    """

    title: str
    budgets: Mapping[Any, int] | None


def stack(bench: Bench) -> nn.Module:
    """Return layers on the host, of random weights that are drawn on the device, which is faster."""
    width, layers = bench.sized((WIDTH, LAYERS), (64, 8))
    torch.manual_seed(0)
    with bench.device:
        made = nn.Sequential(
            *(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers))
        )
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=width**-0.5)  # outputs are of the inputs' size
    return made.cpu().eval()


def by_drivetrain(bench: Bench, case: Case) -> nn.Module:
    """Return the model as drivetrain keeps it."""
    model = stack(bench)
    if case.budgets is None:
        return cpu_offload(model, bench.device)
    # A dry run is given rates: measured ones would be written to the user's cache.
    rates = Bandwidths(to_device=25e9, from_disk=3e9) if bench.dry else None
    plan = infer_auto_device_map(model, case.budgets, rates=rates)
    print(plan)
    return dispatch_model(model, plan, offload_dir=bench.disk / "drivetrain")


def by_accelerate(bench: Bench, case: Case) -> nn.Module:
    """Return the model as Accelerate keeps it."""
    import accelerate

    model = stack(bench)
    if case.budgets is None:
        return accelerate.cpu_offload(model, execution_device=bench.device)
    plan = accelerate.infer_auto_device_map(model, max_memory=dict(case.budgets))
    return accelerate.dispatch_model(model, plan, offload_dir=str(bench.disk / "accelerate"))


def plain_copy(bench: Bench, parts: int) -> Callable[[], None]:
    """Copy as many layers from pinned memory, into the same memory of the device each time."""
    on_host = [parameter.detach() for parameter in list(stack(bench).parameters())[:parts]]
    sources = [one.pin_memory() for one in on_host] if bench.device.type != "cpu" else on_host
    target = torch.empty_like(sources[0], device=bench.device)

    def call() -> None:
        for source in sources:
            target.copy_(source, non_blocking=True)

    return call


def forward(model: nn.Module, batch: Tensor) -> Callable[[], Tensor]:
    """Return one forward."""

    def call() -> Tensor:
        with torch.inference_mode():
            return model(batch)

    return call


def num_fetched(model: nn.Module, case: Case) -> int:
    """Return how many layers are kept elsewhere than where they are computed."""
    names = [name for name, _ in model.named_children()]
    if case.budgets is None:
        return len(names)
    computing, *_ = case.budgets
    places: Mapping[str, Any] = model.hf_device_map  # pyright: ignore[reportAssignmentType]  set by both libraries
    return sum(places.get(name, places.get("")) != computing for name in names)


def measure(bench: Bench, case: Case, share: float) -> None:
    """Measure one case, with few items and with many."""
    made: dict[str, nn.Module] = {}
    makers = {"drivetrain": by_drivetrain}
    if bench.has("Accelerate"):
        makers["Accelerate"] = by_accelerate
    for name, make in makers.items():
        with bench.attempt(name, ours=name == "drivetrain"):
            made[name] = make(bench, case)
    fetched = {name: num_fetched(model, case) for name, model in made.items()}
    parts, width = fetched.get("drivetrain", bench.sized(LAYERS, 8)), bench.sized(WIDTH, 64)
    told = ", ".join(f"{number} by {name}" for name, number in fetched.items())
    bench.tell(f"{case.title}: layers whose weights are fetched: {told}.")
    resident = stack(bench).to(bench.device)
    for items in bench.sized((FEW, MANY), (2, 4)):
        batch = torch.randn(items, width, dtype=torch.bfloat16, device=bench.device)
        expected = forward(resident, batch)()
        calls: dict[str, Callable[[], object]] = {
            COPY: plain_copy(bench, parts),
            COMPUTE: forward(resident, batch),
        }
        for name, model in made.items():
            with bench.attempt(name, ours=name == "drivetrain"):
                if not torch.equal(forward(model, batch)(), expected):
                    raise ValueError(f"the output of {name} is another one than the resident model's")
                calls[name] = forward(model, batch)
        gigabytes = parts * width**2 * 2 / 1e9
        title = f"{case.title}: {items} items, {gigabytes:.3g} GB fetched"
        table = Table(title=title, unit="ms", measured={}, goals=GOALS, rates={"GB/s": gigabytes}, digits=3)
        bench.measure(table, bench.turns(calls, times=bench.sized(3, 1)), rows=with_bound, share=share / 2)
    if "drivetrain" in made:
        stats = offload_stats(made["drivetrain"])
        bench.tell(
            f"{case.title}: drivetrain had not begun {stats.num_missed} of {stats.num_used} fetches in time."
        )


def with_bound(measured: Measured) -> Measured:
    """Return what was measured, with the bound first."""
    pairs = zip(measured[COPY], measured[COMPUTE], strict=True)
    return {BOUND: [max(pair) for pair in pairs], **measured}


def main() -> None:
    """Measure a model of twice its budget, then one that is on the host."""
    bench = begin(__doc__ or "", rounds=9)
    size_bytes = sum(parameter.nbytes for parameter in stack(bench).parameters())
    computing, beyond = (0, "cpu") if bench.device.type != "cpu" else ("cpu", "disk")
    budgets = {computing: size_bytes // 2, beyond: 4 * size_bytes}
    half = Case(title="A model of twice its budget", budgets=budgets)
    whole = Case(title="A model on the host", budgets=None)
    for case in (half, whole):
        measure(bench, case, share=0.5)
    bench.finish()


if __name__ == "__main__":
    main()
