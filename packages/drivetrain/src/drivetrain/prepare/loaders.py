"""Shard the user's loaders as the data section says, each with a seed that all ranks share."""

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from drivetrain.parts.parts import Parts
from drivetrain.parts.run_seed import draw_by_shard, seed_of_run
from drivetrain_data import DataSettings, ShardedLoader, own_seed, seed_at, shard_loader
from drivetrain_data.settings import UnevenPolicy
from drivetrain_state import ProgressMark, broadcast_object

logger = logging.getLogger(__name__)


def shard(loader: Any, parts: Parts, *, place: int, even: UnevenPolicy | None = None) -> ShardedLoader[Any]:
    """Return this rank's shard of a loader. Called on all ranks.

    Args:
        loader: The loader as the user built it.
        parts: The parts of the Accelerator.
        place: The number of loaders that this run prepared before.
        even: The treatment of the loader's tail; None takes the setting.

    Raises:
        TypeError, ValueError: The object is not a loader, or the settings do not fit it.
    """
    data: DataSettings = parts.resolved["data"].value
    # Every setting is an argument of the same name: a mismatch fails here, and is not silently dropped.
    asked = {each.name: getattr(data, each.name) for each in fields(data)}
    asked["seed"], seed_source = _choose_seed(loader, parts, place)
    asked["even"] = even or asked["even"]
    sharded = shard_loader(
        loader,
        parts.shard,
        num_nodes=parts.context.topology.num_nodes,
        device=parts.context.device,
        group=parts.context.group,
        activity=parts.reading,
        on_batch=_make_on_batch(parts),
        seed_source=seed_source,
        draws_apart=True,
        **asked,
    )
    if parts.watch is not None:
        sharded.watch = parts.watch.watch_reads
    return sharded


def _make_on_batch(parts: Parts) -> Callable[[], None]:
    """Return the function that is called for every batch of a loader."""
    mark, seed, shard = (
        parts.context.progress.mark,
        parts.settings.seed,
        parts.shard.index,
    )  # not the parts: a cycle

    def receive() -> None:
        draw_by_shard(
            seed, shard
        )  # at each batch, since a load may bring back the seed from before the first
        mark(ProgressMark.BATCH)

    return receive


def _choose_seed(loader: Any, parts: Parts, place: int) -> tuple[int, str]:
    """Return the seed of a loader and its source; all ranks get rank 0's. Called on all ranks.

    The seed comes from the loader's generator, else the data section, else the run section, else torch's initial
    seed.
    """
    # shard_loader refuses a sharded one.
    own = None if isinstance(loader, ShardedLoader) else own_seed(loader)
    asked = parts.resolved["data"].value.seed
    if own is not None:
        if asked is not None and parts.context.topology.is_main:
            logger.warning(
                "data.seed=%d does not order loader %d: its own generator does, with seed %d; leave the generator "
                "out to have it follow the setting",
                asked,
                place,
                own,
            )
        found = own, "its own generator"
    elif asked is not None:
        found = asked, "data.seed"
    else:
        found = seed_of_run(parts.settings.seed)
    seed, source = broadcast_object(parts.context, found)
    if own is None and place:
        return seed_at(seed, place), f"{source} ({seed}), hashed with the loader's place {place}"
    return seed, source
