"""What the tests of a process without a group begin from."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def no_group_of_others() -> None:
    """End a process group that a test of another folder has left in this lane."""
    if dist.is_initialized():
        dist.destroy_process_group()
