"""The seed of a run, used where no more specific seed is set."""

import torch

from drivetrain_state import reseed


def seed_of_run(said: int | None) -> tuple[int, str]:
    """Return the seed of the settings, or else torch's initial seed, and its source; rank 0's counts.

    Args:
        said: The run section's seed; None if it is not set, such as in a program that calls torch.manual_seed.
    """
    if said is not None:
        return said, "run.seed"
    return torch.initial_seed() % 2**63, "torch.initial_seed() on rank 0, random where nothing is seeded"


def draw_by_shard(seed: int | None, shard: int) -> None:
    """Make torch draw different numbers, such as dropout masks, for each shard of the data, from the first batch on.

    Ranks that read the same shard still draw the same numbers. Python's and NumPy's generators draw the same numbers
    on all ranks: programs use them for decisions that all ranks share. A generator stays unchanged if the program has
    seeded it, or if a checkpoint taken after the first batch has restored it: torch tells the generator's last seed.

    Args:
        seed: The seed of the run; None if nothing was seeded.
        shard: The index of the shard that this rank reads.
    """
    if seed is not None and shard and torch.initial_seed() == seed:
        reseed(seed, rank=shard, step=0, torch_alone=True)
