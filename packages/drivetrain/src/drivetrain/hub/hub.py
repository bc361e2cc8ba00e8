"""The methods of an Accelerator that publish exports on the Hugging Face Hub and read them from there."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.parts.parts import HasParts, needs_run


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
            card_data: Entries of the card's front matter, such as `{"license": "mit", "datasets": ["me/data"]}`. Its
                "base_model" takes the place of a path that PEFT has written into adapter_config.json.
            token: A token that may write; by default, the one that the host of rank 0 has stored or HF_TOKEN holds.
            endpoint: The URL of the Hub; by default, HF_ENDPOINT or https://huggingface.co.

        Returns:
            The URL of the commit.

        Raises:
            HubError: The upload failed; the Hub shows all of it or nothing.
            FileNotFoundError: There is no such folder.
            NoCheckpointError, CorruptCheckpointError, ValueError: The folder holds no complete export, or a run, or
                adapters that name their base model by a path, without a "base_model" in `card_data`.
            ImportError: huggingface_hub is not installed; `drivetrain[hub]` brings it.
            OtherRankFailedError: The main process failed; the message holds its error.
        """
        from drivetrain.hub import publishing, transfer

        upload = partial(
            transfer.upload, repo_id, private=private, message=message, token=token, endpoint=endpoint
        )
        doing = f"the upload of {folder} to {repo_id}"
        return publishing.push(self._parts, Path(folder), card_data or {}, upload, doing=doing)

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
        from drivetrain.hub import publishing, transfer

        download = partial(
            transfer.download, repo_id, allow_patterns=allow_patterns, token=token, endpoint=endpoint
        )
        return publishing.fetch(self.context, download, revision, doing=f"the download of {repo_id}")
