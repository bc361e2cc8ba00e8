"""The user's loaders become this rank's, as the data section says."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from drivetrain.compose import Parts
from drivetrain_data import DataSettings, ShardedLoader, shard_loader


def shard(loader: Any, parts: Parts, *, on_batch: Callable[[], None]) -> ShardedLoader[Any]:
    """This rank's part of a loader.

    Args:
        loader: The user's.
        parts: What the run is made of.
        on_batch: Called for every batch.

    Raises:
        TypeError, ValueError: It is no loader, or the settings do not fit it.
    """
    data: DataSettings = parts.resolved["data"].value
    # Every setting is an argument of the same name: one that were not would fail here, and not be dropped.
    asked = {each.name: getattr(data, each.name) for each in fields(data)}
    return shard_loader(
        loader,
        parts.shard,
        num_nodes=parts.context.topology.num_nodes,
        device=parts.context.device,
        group=parts.context.group,
        activity=parts.loaders,
        on_batch=on_batch,
        **asked,
    )
