"""What kinds of devices differ in, and packages that know by themselves which execute in the order of the calls."""

from typing import get_args

import pytest

from drivetrain_state.connection import group_backend
from drivetrain_state.device_traits import traits_of
from drivetrain_state.errors import ConnectError
from drivetrain_state.settings import DeviceChoice

KINDS = sorted({*get_args(DeviceChoice)} - {"auto"})


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_collectives_or_is_refused_on_several_processes(kind: str) -> None:
    found = traits_of(kind).collectives
    if found is None:
        with pytest.raises(ConnectError, match=f"device='{kind}' has no collectives"):
            group_backend(kind)
    else:
        assert group_backend(kind).endswith(found)


def test_an_unknown_kind_is_taken_for_one_that_copies_in_order() -> None:
    assert not traits_of("abacus").copies_aside


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"cpu", "xla"}))  # which torch.accelerator does not know
def test_packages_without_a_state_agree_on_what_copies_aside(kind: str) -> None:
    copies = pytest.importorskip("drivetrain_dispatch.device_copies")
    loaders = pytest.importorskip("drivetrain_data.sources.torch_loader")
    logged = pytest.importorskip("drivetrain_tracking.values.device_values")
    found = [copies.copies_aside(kind), kind not in loaders.IN_ORDER, kind not in logged.IN_ORDER]
    assert found == [traits_of(kind).copies_aside] * 3
