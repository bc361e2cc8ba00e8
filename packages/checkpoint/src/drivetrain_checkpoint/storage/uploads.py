"""Upload new objects, which are invisible until they are finished, and leave nothing if they are aborted."""

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from drivetrain_checkpoint.storage.errors import as_os_error
from drivetrain_checkpoint.storage.threads import Task

if TYPE_CHECKING:
    from upath import UPath

PART_BYTES = 64 * 2**20  # S3 takes 10,000 parts, so a file may have 640 GB
_MOST_ON_THEIR_WAY = 4


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
        """Make the object appear: a small one with one request, a larger one once all parts are uploaded."""
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
        """Abort the upload unless it is finished; wait for its parts first: S3 would keep one that arrives later."""
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
        self._on_their_way.append(Task(lambda: self._send_part(number, part)))
        self._part = bytearray()

    def _send_part(self, number: int, part: bytearray) -> dict[str, Any]:
        answer = self._call("upload_part", PartNumber=number, Body=part)
        said = ("ETag", "ChecksumSHA256")  # the second where s3_additional_kwargs asks for it
        return {"PartNumber": number, **{name: answer[name] for name in said if name in answer}}

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
