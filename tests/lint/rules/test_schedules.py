import pytest

from lint.linting import ACCELERATOR, DRIVETRAIN, TORCH, codes

MADE = (
    "import torch\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
    "warmup = torch.optim.lr_scheduler.LinearLR(optimizer)\n"
)


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("for x in loader:\n    scheduler.step()\n    scheduler.step()\n", True),
        ("for epoch in range(3):\n    for x in loader:\n        scheduler.step()\n    scheduler.step()\n", True),
        ("for epoch in range(3):\n    for x in loader:\n        with "
            "accelerator.accumulate(model):\n            scheduler.step()\n"
         "    scheduler.step()\n", True),
        ("for x in loader:\n    scheduler.step()\n", False),
        ("for epoch in range(3):\n    for x in loader:\n        warmup.step()\n    scheduler.step()\n", False),
        ("for epoch in range(3):\n    for x in loader:\n        if by_batch:\n            "
            "scheduler.step()\n    if not by_batch:\n"
         "        scheduler.step()\n", False),
        ("for x in loader:\n    optimizer.step()\n    scheduler.step()\n    optimizer.step()\n    "
            "scheduler.step()\n", False),
        ("scheduler.step()\nscheduler.step()\n", False),  # not in a loop: fast-forwarded by hand
        ("for t in noise_scheduler.timesteps:\n    x = noise_scheduler.step(y, t, x)\n    x = "
            "noise_scheduler.step(y, t, x)\n", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("head", [ACCELERATOR, TORCH], ids=["accelerate", "torch"])
def test_a_schedule_stepped_twice_is_found(loop: str, found: bool, head: str) -> None:
    assert codes(head + MADE + loop) == (["DT305"] if found else [])


@pytest.mark.parametrize(("name", "found"), [("num_processes", True), ("num_samples", False)])
def test_a_prepared_schedule_repeated_by_hand_is_found(name: str, found: bool) -> None:
    source = (
        "scheduler = accelerator.prepare(scheduler)\nfor x in loader:\n"
        f"    for _ in range(accelerator.{name}):\n        scheduler.step()\n"
    )
    assert codes(ACCELERATOR + source) == (["DT305"] if found else [])


def test_a_length_scaled_by_ranks_is_wrong_in_drivetrain_alone() -> None:
    source = "s = get_scheduler('linear', num_training_steps=steps {} accelerator.num_processes)\n"
    for operator in ("//", "*"):
        assert codes(DRIVETRAIN + source.format(operator)) == ["DT306"]
        assert codes(ACCELERATOR + source.format(operator)) == []
    assert (
        codes(DRIVETRAIN + "s = get_scheduler('linear', num_training_steps=accelerator.num_steps(loader))\n")
        == []
    )
