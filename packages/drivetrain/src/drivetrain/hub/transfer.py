"""Upload a folder to the Hugging Face Hub in one commit, and download a repository, by huggingface_hub."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from re import fullmatch
from typing import TypeAlias

from drivetrain_tracking.spool.line import LOG_NAME

# Of a project or a checkpoint; they name hosts and paths.
_OF_RUNS = (LOG_NAME, "plan.json", "manifest.json")
_OF_EXPORTS = (
    r"(adapter_)?model\.safetensors(\.index\.json)?|model-\d+-of-\d+\.safetensors|adapter_config\.json"
)
_LOG_IN = "run `hf auth login` where rank 0 runs, set HF_TOKEN there, or pass token=..."

Files: TypeAlias = Mapping[str, Path | bytes]  # by their names in the repository


class HubError(RuntimeError):
    """An upload to the Hub or a download that failed; of an upload, the Hub shows all or nothing."""


def files_to_push(folder: Path) -> Files:
    """Return the files of an export by their names in a repository; hidden ones are left out.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: The folder holds a log, a plan or a checkpoint of a run.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"push_to_hub({str(folder)!r}): there is no such folder; save_model writes one"
        )
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {
        name.as_posix(): path
        for name, path in found.items()
        if not any(part.startswith(".") for part in name.parts)
    }
    if of_runs := [name for name in files if name.rpartition("/")[2] in _OF_RUNS]:
        raise ValueError(
            f"push_to_hub({str(folder)!r}): the folder holds {of_runs[0]} of a run, which may tell hosts and paths; "
            "push a folder that holds the export alone, as save_model writes it"
        )
    return files


def upload(
    repo_id: str,
    files_for: Callable[[str], Files],
    *,
    private: bool | None,
    message: str,
    token: str | None,
    endpoint: str | None,
) -> str:
    """Commit files to a model repository, which is created if missing, and return the commit's URL.

    Files of an earlier export that the new one lacks are deleted in the same commit. `files_for` returns the files
    from the repository's full name; for the rest see `Accelerator.push_to_hub`.

    Raises:
        HubError: There is no token or no access, the Hub failed, or the repository is not `private` as given.
    """
    with _hub_errors(f"push_to_hub({repo_id!r})", "the Hub shows all of it or nothing; push again to resume"):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

        token = token.strip() if token else get_token()
        if not token:
            raise HubError(f"push_to_hub({repo_id!r}): no token of the Hub was found: {_LOG_IN}")
        api = HfApi(endpoint=endpoint, token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        is_private = api.model_info(repo_id).private
        if private is not None and is_private is not None and is_private != private:
            kind = "private" if is_private else "public"
            raise HubError(
                f"push_to_hub({repo_id!r}, private={private}): the repository exists and is {kind}, so nothing was "
                "uploaded; change that in its settings on the Hub, or leave private out"
            )
        files = files_for(repo_id)
        present = api.list_repo_files(repo_id)
        stale = [name for name in present if fullmatch(_OF_EXPORTS, name) and name not in files]
        operations = [
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=one) for name, one in files.items()),
        ]
        return api.create_commit(repo_id, operations, commit_message=message).commit_url


def download(
    repo_id: str,
    *,
    revision: str | None,
    allow_patterns: Sequence[str] | None,
    token: str | None,
    endpoint: str | None,
    local_files_only: bool = False,
) -> Path:
    """Return the folder of a model repository in the cache of huggingface_hub, named by its commit.

    Raises:
        HubError: The repository or revision is missing or not accessible, or the Hub failed.
    """
    with _hub_errors(f"from_hub({repo_id!r})", "check the name and the revision, or try again"):
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=None if allow_patterns is None else list(allow_patterns),
            token=token,
            endpoint=endpoint,
            local_files_only=local_files_only,
        )
        return Path(folder)


@contextmanager
def _hub_errors(doing: str, advice: str) -> Generator[None]:
    """Raise errors of huggingface_hub and its connections as HubError, with what to do next."""
    if find_spec("huggingface_hub") is None:
        raise ImportError(
            f"{doing}: huggingface_hub is not installed; pip install 'drivetrain[hub]' brings it"
        )
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if type(error).__name__ == "HFValidationError":
            advice = "give a name such as 'owner/name'"
        if status in (401, 403):
            advice = f"the token may not do this: with one that may, {_LOG_IN}"
        # A file that could not be uploaded: only the cause says why.
        told = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        raise HubError(f"{doing}: {type(told).__name__}: {' '.join(str(told).split())}; {advice}") from error
