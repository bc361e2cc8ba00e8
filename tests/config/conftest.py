import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the caller's shell or launcher has set reaches a test."""
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
    for name in list(os.environ):
        if name.startswith(("DRIVETRAIN_", "TORCHELASTIC_", "MASTER_")) or name in ranks:
            monkeypatch.delenv(name)
