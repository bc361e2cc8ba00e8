"""Check this installation on several processes."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drivetrain.settings import RunSettings
from drivetrain_config import Layers, resolve

TOPIC = "Check"  # in `drivetrain --help`


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckArguments:
    """The arguments of `drivetrain test`."""

    num_processes: int = field(
        default=2, metadata={"help": "Number of processes to check with.", "brief": "Processes to check with"}
    )
    cpu: bool = field(
        default=False,
        metadata={
            "help": "Check on the CPU even where an accelerator is present.",
            "brief": "Check on the CPU",
        },
    )
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"unread": ("launch",)})

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ValueError(f"num_processes={self.num_processes!r}: must be at least 1")


def run(arguments: CheckArguments) -> int:
    """Check this installation on N processes.

    Returns:
        The exit code, 0 if every check passed.
    """
    from drivetrain_launcher import LaunchSettings, LaunchTarget, detect_host, plan_launch, run_plan

    wants_cpu = resolve(RunSettings, section="run", layers=arguments.layers).value.cpu
    plan = plan_launch(
        LaunchSettings(num_processes=arguments.num_processes),
        LaunchTarget(name="drivetrain.self_check", kind="module"),
        detect_host("cpu" if wants_cpu else "auto"),
        handed_down=arguments.layers.to_json(),
    )
    return run_plan(plan)


def check_collectives(accelerator: Any) -> str:
    """Check the results of gather, reduce and broadcast against arithmetic."""
    import torch

    rank, count, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    mine = {
        "rank": torch.tensor([rank], device=device),
        "half": torch.full((2, 3), rank + 0.5, device=device),
    }
    gathered = accelerator.gather(mine)
    _expect(gathered["rank"].tolist() == list(range(count)), "gather: ranks are out of order")
    _expect(gathered["half"].shape == (2 * count, 3), "gather: a wrong shape")
    total = accelerator.reduce(mine["rank"]).item()
    _expect(total == count * (count - 1) // 2, f"reduce: the sum of ranks is {total}")
    sent = accelerator.broadcast(mine["half"])
    _expect(bool((sent == 0.5).all()), "broadcast: not what rank 0 sent")
    return "gather, reduce, broadcast"


def check_data(accelerator: Any) -> str:
    """Check that every sample of an epoch arrives once, on one rank, in one order."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    for length in (32, 33, 3):
        loader = accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(length)), batch_size=4, shuffle=True)
        )
        seen = [i for (batch,) in loader for i in accelerator.gather_for_metrics(batch).tolist()]
        _expect(
            sorted(seen) == list(range(length)), f"{length} samples: {len(seen)} seen, some lost or repeated"
        )
    return "every sample once, even and uneven"


def check_training(accelerator: Any) -> str:
    """Check that training on all ranks equals the plain loop over the same global batches, in float64."""
    import torch
    from torch import nn

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    rank, count = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(1)
    batches = torch.randn(6, count, 5, 4, dtype=torch.float64)
    plain = model()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trained = model()
    prepared, optimizer = accelerator.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    for batch in batches:
        plain_optimizer.zero_grad()
        plain(batch.flatten(0, 1)).square().mean().backward()
        plain_optimizer.step()
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(batch[rank].to(accelerator.device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    differences = [
        (a - b.cpu()).abs().max().item()
        for a, b in zip(plain.parameters(), accelerator.unwrap_model(prepared).parameters(), strict=True)
    ]
    _expect(max(differences) < 1e-10, f"weights differ by {max(differences):.1e} from the plain loop's")
    return f"weights equal the plain loop's within {max(max(differences), 1e-16):.0e}"


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise SystemExit(f"drivetrain test: {message}")


def main() -> None:
    """Run every check. Called on all ranks."""
    from drivetrain import Accelerator

    checks: list[tuple[str, Callable[[Any], str]]] = [
        ("collectives", check_collectives),
        ("data", check_data),
        ("training", check_training),
    ]
    with Accelerator() as accelerator:
        accelerator.print(f"{accelerator.num_processes} process(es) on {accelerator.device.type}")
        for name, check in checks:
            accelerator.print(f"  {name:<12} ok  {check(accelerator)}")
        accelerator.print("all checks passed")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
