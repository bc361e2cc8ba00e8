"""Uploads and downloads on several ranks: one transfers, and the others wait for as long as it takes."""

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from drivetrain.hub.base_model import name_bases
from drivetrain.hub.model_card import ExportFacts, describe_export, model_card
from drivetrain.hub.run_curves import draw_losses, read_curves
from drivetrain.hub.transfer import Files, files_to_push
from drivetrain.parts.parts import Parts
from drivetrain.plan.effective import plan_of
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_all_ranks, on_each_rank
from drivetrain_tracking import JSONLTracker

Value = TypeVar("Value")

_CARD, _PICTURE = "README.md", "losses.svg"


def push(
    parts: Parts,
    folder: Path,
    card_data: Mapping[str, Any],
    upload: Callable[[Callable[[str], Files]], str],
    *,
    doing: str,
) -> str:
    """Upload an export with a card by `upload`, on rank 0; see `Accelerator.push_to_hub`. Called on all ranks."""

    def push_on_main() -> str:
        json.dumps(dict(card_data))  # what is no JSON is a TypeError before anything is created
        base_model = card_data.get("base_model")
        files, export = files_to_push(folder), describe_export(folder, base_model)
        files = name_bases(files, base_model)
        return upload(lambda repo_id: _with_card(files, repo_id, export, parts, card_data))

    action = push_on_main if parts.context.topology.is_main else None
    return cast("str", run_beyond_timeouts(parts.context, action, doing=doing)[0])


def fetch(context: Context, download: Callable[..., Path], revision: str | None, *, doing: str) -> Path:
    """Return the folder of one commit by `download`, once a node; see `Accelerator.from_hub`. Called on all ranks."""
    topology = context.topology
    first = partial(download, revision=revision) if topology.is_main else None
    commit = cast("Path", run_beyond_timeouts(context, first, doing=doing)[0]).name
    own = partial(download, revision=commit)
    is_first_of_node = topology.is_local_main and not topology.is_main
    run_beyond_timeouts(context, own if is_first_of_node else None, doing=doing)
    return on_each_rank(context, partial(own, local_files_only=True), doing=doing)


def run_beyond_timeouts(
    context: Context, action: Callable[[], Value] | None, *, doing: str
) -> Sequence[Value | None]:
    """Run an action that may take longer than the timeout of a collective. Called on all ranks.

    A thread runs the action, and all ranks meet three times within the shortest timeout until all are done.

    Args:
        context: The context of this process.
        action: The action of this rank; None waits for the others.
        doing: The text of what is done, for errors.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        OtherRankFailedError: Another rank failed; on the rank that failed, its own error is raised.
    """
    run = action or (lambda: None)
    if context.topology.world_size == 1:
        return [run()]
    beat_seconds = min(context.settings.timeout_seconds, context.settings.hang_timeout_seconds) / 3
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        while True:
            wait([running], timeout=beat_seconds)
            if all(on_all_ranks(context, running.done, doing=doing)):
                return on_all_ranks(context, running.result, doing=doing)


def _with_card(
    files: Files, repo_id: str, export: ExportFacts, parts: Parts, card_data: Mapping[str, Any]
) -> Files:
    """Return the files with a card and the picture in it, unless the files have a card."""
    if _CARD in files:
        return files
    logs = [one.path for one in parts.trackers.used if isinstance(one, JSONLTracker)]
    config, curves = read_curves(logs[0]) if logs else ({}, [])
    picture = draw_losses(curves)
    num_steps = max((one.num_steps for one in parts.prepared.optimizers), default=0)
    sizes = {
        f"data {number}, samples": f"{len(loader.dataset):,}"
        for number, loader in enumerate(parts.prepared.loaders)
        if isinstance(loader.dataset, Sized)
    }
    card = model_card(
        repo_id,
        export=export,
        plan=plan_of(parts),
        facts={"optimizer steps": f"{num_steps:,}", **sizes},
        config=config,
        curves=curves,
        picture=picture and _PICTURE,
        card_data=card_data,
    )
    drawn = {_PICTURE: picture.encode()} if picture else {}
    return {**files, **drawn, _CARD: card.encode()}
