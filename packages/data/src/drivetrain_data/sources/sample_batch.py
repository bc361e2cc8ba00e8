"""A batch of the first samples of a loader, read apart from its loops."""

from typing import Any

from torch import Generator

from drivetrain_data.randomness.generators import preserve_generators
from drivetrain_data.sources.torch_loader import is_stock, rebuild
from drivetrain_data.sources.wrapped_datasets import moves_as_read
from drivetrain_data.state.sampler_parts import length_of


def sample_batch(loader: Any, batch_size: int) -> Any:
    """Return a batch as the loader would collate it; None if its data can be read only once or by its own class.

    Generators draw what they would have drawn without this call. Where the user's loader has workers, one of them
    reads.
    """
    dataset = getattr(loader, "dataset", None)
    size = length_of(dataset)
    if not is_stock(loader) or not size or moves_as_read(dataset):
        return None
    places = [place % size for place in range(batch_size)]
    reader = rebuild(
        loader,
        dataset,
        Generator(),
        batch_sampler=[places],
        num_workers=min(1, loader.num_workers),
        persistent_workers=False,
        pin_memory=False,
    )
    return next(preserve_generators(iter(reader)))
