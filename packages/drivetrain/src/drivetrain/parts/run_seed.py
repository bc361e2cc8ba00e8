"""The seed of a run where nothing more special says one."""

import torch

from drivetrain_state import reseed


def seed_of_run(said: int | None) -> tuple[int, str]:
    """Return the seed that the settings say, or else torch's own, and its source; rank 0's counts.

    Args:
        said: The run section's seed; None if it says none, as where a program calls torch.manual_seed itself.
    """
    if said is not None:
        return said, "run.seed"
    return torch.initial_seed() % 2**63, "torch.initial_seed() on rank 0, random where nothing is seeded"


def draw_by_shard(seed: int | None, shard: int) -> None:
    """Have torch draw other numbers, such as dropout's masks, for each shard of the data, from its first batch on.

    Ranks that read one shard go on drawing the same. So do all ranks with Python's and NumPy's generators, by which a
    program decides what every rank does. Generators that the program has seeded itself, or that a checkpoint has
    restored after its own first batch, are left alone: torch tells the seed that its generator got last.

    Args:
        seed: The seed of the run; None if nothing was seeded.
        shard: The index of the shard that this rank reads.
    """
    if seed is not None and shard and torch.initial_seed() == seed:
        reseed(seed, rank=shard, step=0, torch_alone=True)
