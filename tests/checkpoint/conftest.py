"""What the checkpoint tests share."""

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import pytest
import torch

from drivetrain_state import Context, Topology
from object_store import s3_server


@pytest.fixture
def context() -> Context:
    """One process, alone."""
    return Context(topology=Topology(), device=torch.device("cpu"))


@pytest.fixture(scope="session")
def s3_options() -> Iterator[Mapping[str, Any]]:
    """How to reach an S3 server that lives as long as the tests."""
    for name in ("upath", "s3fs", "moto.server"):
        pytest.importorskip(
            name, reason="checkpoints on S3 are tested where the workspace's tools are installed"
        )
    with s3_server() as options:
        yield options


@pytest.fixture
def bucket(s3_options: Mapping[str, Any]) -> str:
    """A bucket of the test's own."""
    from s3fs import S3FileSystem

    name = f"bucket-{uuid4().hex}"
    S3FileSystem(**s3_options).mkdir(name)
    return name
