"""Megatron's layers pass the contract of every backend, divided by two and replicated."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from torch import nn

from drivetrain_backends import BackendContract
from drivetrain_megatron import MegatronBackend, MegatronSettings
from drivetrain_megatron.groups import close_parallel_state
from drivetrain_state import ParallelDims
from megatron_layers import column_layer, row_layer
from megatron_on_cpu import megatron_on_cpu
from plain_loop.backends import context


class ClosesState(MegatronBackend):
    """Ends Megatron's state with each backend: without one, the contract's plain loop builds whole layers."""

    def close(self) -> None:
        super().close()
        close_parallel_state()


class ColumnContract(BackendContract):
    backend = ClosesState
    settings: ClassVar[Any] = MegatronSettings(bucket_size_mb=1)
    modes = ("no",)
    # torch.compile does not trace the functions of torch that `megatron_on_cpu` puts in place.
    cases: ClassVar[Any] = {name: case for name, case in BackendContract.cases.items() if name != "compiled"}
    layer: ClassVar[Callable[..., nn.Module]] = staticmethod(column_layer)


class RowContract(ColumnContract):
    layer: ClassVar[Callable[..., nn.Module]] = staticmethod(row_layer)


def check(contract: type[BackendContract], **sizes: int) -> None:
    with megatron_on_cpu(), context(parallelism=ParallelDims(**sizes)) as where:
        ran = contract().check_all(where)
        assert {"check_gan", "check_resume", "tied weights", "frozen layer"} <= set(ran)


@pytest.mark.ranks(2, timeout_seconds=170)
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2}], ids=str)
@pytest.mark.default_cases("{'tensor': 2}")
def test_layers_divided_by_columns_pass_the_contract(sizes: dict[str, int]) -> None:
    check(ColumnContract, **sizes)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_seconds=170)
def test_layers_divided_by_rows_pass_the_contract() -> None:
    check(RowContract, tensor=2)


@pytest.mark.slow
@pytest.mark.ranks(3, timeout_seconds=170)
@pytest.mark.parametrize("contract", [ColumnContract, RowContract])
def test_layers_divided_by_three_pass_the_contract(contract: type[BackendContract]) -> None:
    check(contract, tensor=3)  # which divide the contract's layers of 6


@pytest.mark.slow
@pytest.mark.ranks(4, timeout_seconds=170)
@pytest.mark.parametrize("contract", [ColumnContract, RowContract])
def test_replicas_of_divided_layers_pass_the_contract(contract: type[BackendContract]) -> None:
    check(contract, data=2, tensor=2)
