"""Publish an export of a run on the Hugging Face Hub, and read one from there."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from drivetrain.hub.model_card import describe_export, model_card
from drivetrain.hub.run_curves import draw_losses, read_curves
from drivetrain.hub.transfer import download, files_to_push, upload
from drivetrain.parts.parts import HasParts, needs_run
from drivetrain.plan.effective import plan_of
from drivetrain_state import Context, gather_object
from drivetrain_state.collectives.collective_errors import on_all_ranks, on_each_rank
from drivetrain_tracking import JSONLTracker

Value = TypeVar("Value")

_PICTURE = "losses.svg"


class Hub(HasParts):
    """The part of an Accelerator that publishes exports and downloads them."""

    @needs_run
    def push_to_hub(
        self,
        folder: Path | str,
        repo_id: str,
        *,
        private: bool | None = None,
        message: str = "Upload a model trained with drivetrain",
        card_data: Mapping[str, Any] | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Upload an export to the Hugging Face Hub in one commit, with a card of the run. Called on all ranks.

        The main process uploads, and the other ranks wait for as long as it takes. The card, README.md, tells how to
        load the model, the plan, the data, the numbers of the run's configuration, and the metrics and losses of the
        log of "jsonl". A README.md in the folder is uploaded in its place.

        Args:
            folder: The folder that `save_model` has written, with what the program has added.
            repo_id: The repository, as "name" or "owner/name"; it is created if missing.
            private: Whether the repository is private. None creates a repository of the account's default.
            message: The message of the commit.
            card_data: Entries of the card's front matter, such as `{"license": "mit", "datasets": ["me/data"]}`.
            token: A token that may write; by default, the one that the host of rank 0 has stored or HF_TOKEN holds.
            endpoint: The URL of the Hub; by default, HF_ENDPOINT or https://huggingface.co.

        Returns:
            The URL of the commit.

        Raises:
            HubError: The upload failed; nothing of it is visible on the Hub.
            NoCheckpointError, CorruptCheckpointError, ValueError: The folder holds no complete export, or a run.
            ImportError: huggingface_hub is not installed; `drivetrain[hub]` brings it.
            OtherRankFailedError: The main process failed; the message holds its error.
        """

        def push() -> str:
            place = Path(folder)
            export = describe_export(place)
            files: dict[str, Path | bytes] = {**files_to_push(place)}
            if "README.md" not in files:
                logs = [one.path for one in self._parts.trackers.used if isinstance(one, JSONLTracker)]
                config, curves = read_curves(logs[0]) if logs else ({}, [])
                if (picture := draw_losses(curves)) is not None:
                    files[_PICTURE] = picture.encode()
                card = model_card(
                    repo_id,
                    export=export,
                    plan=plan_of(self._parts),
                    num_steps=max((one.num_steps for one in self._parts.prepared.optimizers), default=0),
                    config=config,
                    curves=curves,
                    picture=None if picture is None else _PICTURE,
                    card_data=card_data or {},
                )
                files["README.md"] = card.encode()
            return upload(files, repo_id, private=private, message=message, token=token, endpoint=endpoint)

        is_main = self.context.topology.is_main
        doing = f"the upload of {folder} to {repo_id}"
        return cast("str", without_haste(self.context, push if is_main else None, doing=doing)[0])

    @needs_run
    def from_hub(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        allow_patterns: Sequence[str] | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> Path:
        """Download a model repository of the Hugging Face Hub once a node. Called on all ranks.

        All ranks get the same commit. Without a connection, a complete download of before is taken.

        Args:
            repo_id: The repository, as "owner/name".
            revision: A branch, tag or commit; "main" by default.
            allow_patterns: The files to download, such as `["*.safetensors", "*.json"]`; all by default.
            token: A token for private repositories; by default, the one that is stored or HF_TOKEN holds.
            endpoint: The URL of the Hub; by default, HF_ENDPOINT or https://huggingface.co.

        Returns:
            The folder, for `load_model`, `from_pretrained` or any other loader; do not write into it.

        Raises:
            HubError: The repository cannot be read; the message says why.
            ImportError: huggingface_hub is not installed; `drivetrain[hub]` brings it.
            OtherRankFailedError: Another rank failed; the message holds its error.
        """
        fetch = partial(download, repo_id, allow_patterns=allow_patterns, token=token, endpoint=endpoint)
        topology, doing = self.context.topology, f"the download of {repo_id}"
        first = partial(fetch, revision=revision) if topology.is_main else None
        commit = cast("Path", without_haste(self.context, first, doing=doing)[0]).name
        own = partial(fetch, revision=commit)
        without_haste(self.context, own if topology.is_local_main else None, doing=doing)
        return on_each_rank(self.context, partial(own, local_files_only=True), doing=doing)


def without_haste(
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
            if all(gather_object(context, running.done())):
                return on_all_ranks(context, running.result, doing=doing)
