import pytest

from drivetrain_backends import (
    BackendRegistry,
    DDPBackend,
    FSDPBackend,
    SingleBackend,
    UnknownBackendError,
    register_backend,
)


def test_the_installed_backends_are_found_by_name() -> None:
    assert BackendRegistry().get("single") is SingleBackend
    assert BackendRegistry().get("ddp") is DDPBackend
    assert BackendRegistry().get("fsdp") is FSDPBackend


def test_a_backend_is_added_without_changing_anything_elsewhere() -> None:
    class Mine(SingleBackend):
        pass

    registry = register_backend("mine", Mine)
    assert registry.get("mine") is Mine
    assert "mine" in registry.names()
    assert "mine" not in BackendRegistry().names()


def test_an_unknown_backend_lists_those_there_are() -> None:
    known = "'auto' or one of 'ddp', .*'fsdp', .*'single'"
    with pytest.raises(UnknownBackendError, match=f"backend='dpp': .*; did you mean ddp; must be {known}"):
        BackendRegistry().get("dpp")
