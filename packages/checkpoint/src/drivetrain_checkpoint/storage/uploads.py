"""Upload new objects. An object is invisible until it is finished; an aborted upload leaves nothing.

This module also adds functions of S3 that fsspec lacks, through s3fs, and turns every store's errors into `OSError`.
"""

import logging
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from drivetrain_checkpoint.storage.threads import Task

if TYPE_CHECKING:
    from upath import UPath

logger = logging.getLogger(__name__)

PART_BYTES = 64 * 2**20  # S3 takes 10,000 parts, so a file may have 640 GB
_MOST_ON_THEIR_WAY = 4
_KINDS = (FileNotFoundError, PermissionError, OSError)


@contextmanager
def as_os_error(path: "UPath") -> Generator[None]:
    """Run the block and turn any exception into an `OSError` that names the URL.

    Raises:
        FileNotFoundError: An object or bucket does not exist.
        PermissionError: The credentials do not allow the operation.
        OSError: The block raised another exception.
    """
    try:
        yield
    except Exception as error:
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), OSError)
        raise kind(f"{path}: {error or type(error).__name__}") from error


def is_s3(fs: Any) -> bool:
    """Return whether a file system is from s3fs, which gives access to S3's own API."""
    return hasattr(fs, "call_s3")


def check_bucket(fs: Any, path: str) -> None:
    """Check that the bucket of a path exists, to tell a missing bucket from an empty prefix."""
    bucket, _, _ = fs.split_path(path)
    fs.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)


def abort_uploads(fs: Any, path: str) -> None:
    """Abort every upload below a prefix: the parts that a killed process left are invisible, but billed."""
    bucket, prefix, _ = fs.split_path(path)
    try:
        found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        for upload in found.get("Uploads", ()):
            fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
    except FileNotFoundError:
        raise
    except OSError as error:  # this call needs further permissions, and not every store has it
        logger.info("parts of uploads below s3://%s are not looked for: %s", path, error)


class S3Upload:
    """A writer of a new object on S3 that uploads several parts at once; the files of s3fs upload them one by one.

    At most `_MOST_ON_THEIR_WAY` + 1 parts are in memory.
    """

    def __init__(self, path: "UPath") -> None:
        self._path = path
        self._fs: Any = path.fs
        self._bucket, self._key, _ = self._fs.split_path(path.path)
        self._part = bytearray()
        self._upload_id: str | None = None
        self._on_their_way: deque[Task[dict[str, Any]]] = deque()
        self._arrived: list[dict[str, Any]] = []

    def write(self, data: memoryview) -> None:
        """Append `data` to the object; wait while the maximum number of parts is in flight."""
        with as_os_error(self._path):
            while len(data):
                room = PART_BYTES - len(self._part)
                self._part += data[:room]
                data = data[room:]
                if len(self._part) == PART_BYTES:
                    self._send()

    def finish(self) -> None:
        """Make the object appear: send a small object with one request, or wait for a larger object's parts."""
        with as_os_error(self._path):
            if self._upload_id is None:
                self._fs.pipe_file(self._path.path, bytes(self._part))
                return
            if self._part:
                self._send()
            while self._on_their_way:
                self._await_one()
            self._call("complete_multipart_upload", MultipartUpload={"Parts": self._arrived})
            self._upload_id = None

    def close(self) -> None:
        """Abort the upload unless it is finished. Wait for the parts first: S3 would keep parts that arrive later."""
        for task in self._on_their_way:
            task.wait()
        if self._upload_id is not None:
            with as_os_error(self._path):
                self._fs.abort_mpu(self._bucket, self._key, self._upload_id)
            self._upload_id = None

    def _send(self) -> None:
        """Start the upload of the current part, once fewer than the maximum are in flight."""
        if self._upload_id is None:
            begun = self._fs.call_s3("create_multipart_upload", Bucket=self._bucket, Key=self._key)
            self._upload_id = begun["UploadId"]
        if len(self._on_their_way) == _MOST_ON_THEIR_WAY:
            self._await_one()
        number, part = len(self._arrived) + len(self._on_their_way) + 1, self._part

        def send() -> dict[str, Any]:
            answer = self._call("upload_part", PartNumber=number, Body=part)
            said = ("ETag", "ChecksumSHA256")  # the second where s3_additional_kwargs asks for it
            return {"PartNumber": number, **{name: answer[name] for name in said if name in answer}}

        self._on_their_way.append(Task(send))
        self._part = bytearray()

    def _await_one(self) -> None:
        self._arrived.append(self._on_their_way.popleft().result())

    def _call(self, method: str, **arguments: object) -> Any:
        return self._fs.call_s3(
            method, Bucket=self._bucket, Key=self._key, UploadId=self._upload_id, **arguments
        )


class StreamedUpload:
    """A writer of a new object on any store through fsspec's file object, which mostly uploads parts one by one."""

    def __init__(self, path: "UPath") -> None:
        self._path = path
        self._is_finished = False
        with as_os_error(path):
            self._file: Any = path.fs.open(path.path, "wb", block_size=PART_BYTES)

    def write(self, data: memoryview) -> None:
        """Append `data` to the object."""
        with as_os_error(self._path):
            self._file.write(data)

    def finish(self) -> None:
        """Make the object appear."""
        with as_os_error(self._path):
            self._file.close()
        self._is_finished = True

    def close(self) -> None:
        """Abort the upload unless it is finished."""
        if self._is_finished:
            return
        with as_os_error(self._path):
            self._file.discard()
            if hasattr(self._file, "forced"):  # fsspec's buffered files would flush when garbage collected
                self._file.closed = True
            with suppress(FileNotFoundError):
                self._path.fs.rm_file(self._path.path)  # some stores write immediately, such as memory://
