"""A field that a class of options does not have is told by its name and the nearest one."""

from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import pytest

from drivetrain_accelerate.interface.module_table import module_table

theirs: Any = pytest.importorskip("accelerate.utils.dataclasses")
HOMES = module_table().names["accelerate.utils.dataclasses"]
OPTIONS = sorted(
    name
    for name, value in vars(theirs).items()
    if is_dataclass(value) and name in HOMES and ".plugins." in HOMES[name].module
)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_unknown_field_is_an_error_of_both(name: str) -> None:
    ours = getattr(import_module(HOMES[name].module), HOMES[name].name)
    with pytest.raises(TypeError, match="no_such_field"):
        getattr(theirs, name)(no_such_field=1)
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected.*'no_such_field': Accelerate 1\.15"):
        ours(no_such_field=1)


def test_the_nearest_field_is_named() -> None:
    home = HOMES["FullyShardedDataParallelPlugin"]
    with pytest.raises(TypeError, match=r"did you mean sharding_strategy\. The fields are fsdp_version, "):
        getattr(import_module(home.module), home.name)(sharding_stratgy="FULL_SHARD")


def test_the_nearest_argument_of_an_accelerator_is_named() -> None:
    home = module_table().names["accelerate"]["Accelerator"]
    with pytest.raises(
        TypeError, match=r"no such argument; did you mean mixed_precision\. The arguments are"
    ):
        getattr(import_module(home.module), home.name)(mixd_precision="no")
