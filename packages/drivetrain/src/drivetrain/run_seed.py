"""The seed of a run where nothing more special says one."""

import torch


def seed_of_run(said: int | None) -> tuple[int, str]:
    """Return the seed that the settings say, or else torch's own, and its source; rank 0's counts.

    Args:
        said: The run section's seed; None if it says none, as where a program calls torch.manual_seed itself.
    """
    if said is not None:
        return said, "run.seed"
    return torch.initial_seed() % 2**63, "torch.initial_seed() on rank 0, random where nothing is seeded"
