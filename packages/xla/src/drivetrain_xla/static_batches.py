"""Batches of one size: the tail of an epoch is padded, and a mask says which rows are real.

XLA compiles a graph for each shape, and the last batch of an epoch is a shape of its own. Padding is done where a
batch is made, on the host: on the device, it would itself be a graph for each size.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import default_collate

MASK = "sample_mask"  # the key of the mask in a batch that is a dict

Batch: TypeAlias = Any  # a tensor, or a dict, list or tuple of tensors whose dimension 0 is the samples


class PadTail:
    """A collate function whose batches all have the same number of rows, with a mask of the real ones.

    A dict gets the mask, of shape (batch_size,) and dtype bool, as `"sample_mask"`; a list, tuple or single tensor
    becomes a tuple with the mask behind its items. Padding repeats the last row, so that every value is one that the
    model may get; batch normalisation sees the repeated rows. `gather_for_metrics` leaves them out by itself, if
    `collate` makes a row of each sample; of a batch from which it drops samples, only the mask tells.

    Args:
        batch_size: The number of rows of every batch.
        collate: The function that makes a batch of samples.

    Example:
        >>> loader = torch.utils.data.DataLoader(range(5), batch_size=4, collate_fn=PadTail(4))
        >>> [(x.tolist(), mask.tolist()) for x, mask in loader][-1]
        ([4, 4, 4, 4], [True, False, False, False])
    """

    def __init__(self, batch_size: int, *, collate: Callable[[list[Any]], Batch] = default_collate) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r}: must be at least 1")
        self.padded_size = batch_size  # by which prepared loaders know, and gather_for_metrics trims
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Batch:
        """Return the batch of these samples, padded."""
        batch = self.collate(samples)
        mask = torch.arange(self.padded_size) < _count_rows(batch)
        batch = pad_rows(batch, self.padded_size)
        if isinstance(batch, dict):
            return {**batch, MASK: mask}
        return (*batch, mask) if isinstance(batch, (list, tuple)) else (batch, mask)


def pad_rows(batch: Batch, num_rows: int) -> Batch:
    """Return a batch whose tensors have `num_rows` rows, by repeating the last.

    Raises:
        TypeError: A part is neither a tensor with rows nor a dict, list or tuple of these.
        ValueError: Tensors have more rows, none, or different numbers of them.
    """
    count = _count_rows(batch)
    if not 0 < count <= num_rows:
        raise ValueError(
            f"a batch of {count} rows cannot be padded to {num_rows}: PadTail's batch_size is that of the "
            "DataLoader, and a collate function leaves at least one sample"
        )
    return _padded(batch, num_rows - count)


def _padded(batch: Batch, missing: int) -> Batch:
    if isinstance(batch, Tensor):
        return torch.cat([batch, batch[-1:].expand(missing, *batch.shape[1:])]) if missing else batch
    if isinstance(batch, Mapping):
        return {key: _padded(value, missing) for key, value in batch.items()}
    parts = [_padded(value, missing) for value in batch]
    kind: Any = type(batch)
    return kind._make(parts) if hasattr(kind, "_make") else kind(parts)


def _count_rows(batch: Batch) -> int:
    """Return the number of rows of a batch, which all of its tensors have."""
    counts = {len(tensor) for tensor in _tensors_of(batch)}
    if len(counts) != 1:
        said = " and ".join(map(str, sorted(counts))) or "no"
        raise ValueError(
            f"a batch whose tensors have {said} rows cannot be padded: they have a row for each sample, as "
            "the mask has; make them so in the collate function, or say data.even=drop"
        )
    return counts.pop()


def _tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(batch, Tensor) and batch.dim():
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_of(part)
    else:
        what = "a tensor of shape ()" if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(
            f"a batch that holds {what} cannot be padded: PadTail pads tensors with a row for each sample, in dicts, "
            "lists and tuples. Pad in a collate function of your own, or say data.even=drop"
        )


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the real rows of `values`, of shape (batch_size, ...), and their number of values.

    The two are what `backward(loss, count=count)` takes; their quotient is the mean over the real rows.
    """
    rows = mask.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return torch.where(rows, values, 0.0).sum(), rows.sum()
