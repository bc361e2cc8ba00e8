"""The settings of how data is sharded, ordered and delivered."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

UnevenPolicy = Literal["uneven", "pad", "drop"]
ShardingStrategy = Literal["interleaved", "block", "node"]


def _setting(default: Any, text: str, *, needs: str = "a prepared loader") -> Any:
    """Return a field with its help text and with the name of the object that it `needs` to take effect."""
    return field(default=default, metadata={"needs": needs, "help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The `data` section of the settings: how loaders are sharded over ranks."""

    even: UnevenPolicy = _setting(  # noqa: RUF009 it returns a field
        "uneven",
        "Handling of an epoch's tail: distribute it unevenly without repeating a sample, pad it with "
        "repeats, or drop it.",
    )
    strategy: ShardingStrategy = _setting(  # noqa: RUF009 it returns a field
        "interleaved",
        "Whether ranks take turns over the whole order, or each rank or node reads its own block of the "
        "data.",
    )
    split_batches: bool = _setting(
        False, "Whether a loader's batch size is the sum over ranks instead of the size on each rank."
    )
    dispatch: bool | None = _setting(
        None,
        "Whether one rank reads and distributes the batches; unset: for iterable datasets and loaders of "
        "other libraries.",
    )
    seed: int | None = _setting(
        None,
        "Seed of the order of shuffled data and of workers; unset: the run's seed, or torch's initial seed.",
    )
    non_blocking: bool = _setting(
        True, "Whether to copy pinned batches to the device without waiting for the copy."
    )
    copy_ahead: int = _setting(
        1, "Number of batches to copy to an accelerator ahead of the loop; each occupies memory there."
    )
    read_ahead: bool = _setting(
        False,
        "Whether to send the next batch while ranks compute on the current one, with dispatch.",
        needs="dispatch!=False and a prepared loader",
    )

    def __post_init__(self) -> None:
        """Raise ValueError for a value outside its range; the message begins with the field's name."""
        if self.even not in get_args(UnevenPolicy):
            raise ValueError(f"even={self.even!r}: must be one of {', '.join(get_args(UnevenPolicy))}")
        if self.strategy not in get_args(ShardingStrategy):
            raise ValueError(
                f"strategy={self.strategy!r}: must be one of {', '.join(get_args(ShardingStrategy))}; a "
                "function of your own goes to shard_loader(strategy=...)"
            )
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise ValueError(f"seed={self.seed!r}: must be an integer between 0 and 2**63 - 1")
        if type(self.copy_ahead) is not int or self.copy_ahead < 0:
            raise ValueError(f"copy_ahead={self.copy_ahead!r}: must be an integer, 0 or more batches")
