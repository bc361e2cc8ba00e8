"""Check that the storages in a file of `torch.save` can be mapped, as torch does not check the bytes there."""

import pickle
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from drivetrain_weights.errors import WeightFilesError

_STATE = "data.pkl"  # the record of all that is no tensor's data
_ITEM_BYTES = {
    **dict.fromkeys(("UntypedStorage", "ByteStorage", "CharStorage", "BoolStorage", "QInt8Storage"), 1),
    **dict.fromkeys(("QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}


@contextmanager
def checked_records(path: Path) -> Generator[None]:
    """Check the records of a file of `torch.save` before and after the block, which maps it.

    Before the block, no record may be compressed or occur twice. After the block, when torch has found the file to be
    safe, each record must have its storage's size. A file that is no archive is not checked.
    """
    if not zipfile.is_zipfile(path):
        yield
        return
    with zipfile.ZipFile(path) as file:
        records = _list_records(path, file)
        yield
        state = next(name for name in records if name.endswith(f"/{_STATE}"))
        with file.open(state) as opened:
            storages = _StorageSizes(opened)
            storages.load()
    for key, size in storages.found.items():
        held = records.get(f"{state.removesuffix(_STATE)}data/{key}", 0)
        if held != size:
            raise WeightFilesError(
                f"{path} holds {held} bytes of a tensor of {size} (record {key}): it was cut or damaged; fetch "
                "it again"
            )


def _list_records(path: Path, file: zipfile.ZipFile) -> dict[str, int]:
    records: dict[str, int] = {}
    for record in file.infolist():
        if record.filename in records:
            raise WeightFilesError(f"{path} holds the record {record.filename!r} twice: fetch it again")
        if record.compress_type != zipfile.ZIP_STORED:
            raise WeightFilesError(
                f"{path} is compressed ({record.filename!r}), so that its tensors cannot be mapped: load it with "
                "torch.load without mmap, and save it again with torch.save or safetensors.torch.save_file"
            )
        records[record.filename] = record.file_size
    return records


class _Inert:
    """A stand-in for every unpickled object, which accepts all calls and does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> "_Inert":
        return self

    __setitem__ = __setstate__ = extend = append = __init__


class _StorageSizes(pickle.Unpickler):
    """An unpickler that imports nothing and records the bytes of each storage."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.found: dict[str, int] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the item size in bytes for a storage class, and `_Inert` for any other name."""
        return _ITEM_BYTES.get(global_name, _Inert) if module_name.startswith("torch") else _Inert

    def persistent_load(self, pid: Any) -> _Inert:
        """Record the bytes of a storage, `("storage", class, key, device, number of items)`."""
        _, item_bytes, key, _, count = pid
        if isinstance(item_bytes, int):
            self.found[key] = item_bytes * count
        return _Inert()
