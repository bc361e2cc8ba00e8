import platform

import pytest
import torch

from drivetrain_memory.system_heap import heap_use, trim_heap

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc tells of its heap")


def test_a_tensor_on_the_host_counts_as_used_until_it_is_freed() -> None:
    before = heap_use()
    block = torch.ones(5_000_000)
    during = heap_use()
    del block
    after = heap_use()
    assert before is not None
    assert during is not None
    assert after is not None
    assert during.used_bytes - before.used_bytes >= 20_000_000
    assert during.used_bytes - after.used_bytes >= 20_000_000


def test_the_heap_can_be_trimmed() -> None:
    assert trim_heap()
