"""A DeepSpeed configuration whose values programs read by dotted names."""

import errno
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any, cast

from drivetrain_accelerate.strictness import is_strict
from drivetrain_config.files.file_text import parse_json, read_text


class HfDeepSpeedConfig:
    """A DeepSpeed configuration: the nested dict `config`, read by names such as `zero_optimization.stage`.

    It is made from a mapping (copied), the path of a JSON file, or a dict's JSON in base64.
    """

    config: dict[str, Any]

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Update the stage and the offloading from the present contents of the configuration."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        names = ("offload_optimizer", "offload_param")
        devices = [self.get_value(f"zero_optimization.{name}.device") for name in names]
        is_divided = self.is_zero2() or self.is_zero3()
        self._offload = is_divided and any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the mapping around a value, or None if it does not exist, and the value's key in the mapping."""
        *path, name = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        return (cast("dict[str, Any]", node) if isinstance(node, dict) else None), name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value, or the default if the configuration lacks the value."""
        node, name = self.find_config_node(ds_key_long)
        return default if node is None else node.get(name, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a value or a section. If it does not exist and `must_exist` is true, raise a ValueError."""
        node, name = self.find_config_node(ds_key_long)
        if node is not None and node.get(name) is not None:
            del node[name]
        elif must_exist:
            raise ValueError(f"Can't find {ds_key_long} entry in the config: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a value exists and is true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a value exists and is false."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        """Return whether the stage is 2: gradients and optimizer states are partitioned."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Return whether the stage is 3: parameters are partitioned too."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Return whether anything is offloaded."""
        return self._offload


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return deepcopy(dict(cast("Mapping[str, Any]", given)))
    if not isinstance(given, str | PathLike):
        raise TypeError(
            f"a DeepSpeed configuration is a mapping, a JSON file or JSON in base64, not {type(given).__name__}"
        )
    path = Path(cast("str | PathLike[str]", given))
    try:
        text = read_text(path)
    except OSError as error:
        # What names no file may be base64, which is longer than names of files may be.
        if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
            raise ValueError(f"{given}: {error.strerror}") from error
        try:
            text = urlsafe_b64decode(str(given)).decode("utf-8")
        except ValueError:  # of either decoder
            raise ValueError(
                f"hf_ds_config={given!r}: must be a dict, the path of a JSON file that exists, or a dict's JSON in "
                "base64"
            ) from None
    try:
        read = parse_json(path, text, object_pairs_hook=_refuse_repeats)
    except ValueError as error:
        raise ValueError(f"{given}: is no JSON that can be used ({error})") from error
    if not isinstance(read, dict):
        raise ValueError(f"{given}: must hold a JSON object, not a {type(read).__name__}")
    return cast("dict[str, Any]", read)


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated and is_strict():
        raise ValueError(f"{', '.join(repeated)} stands there twice")
    return dict(pairs)
