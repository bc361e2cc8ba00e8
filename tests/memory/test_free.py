import gc
import weakref

import pytest
import torch

from drivetrain_memory import free_memory


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_garbage_in_cycles_goes() -> None:
    gc.disable()
    try:
        one = Cycle()
        seen = weakref.ref(one)
        del one
        free_memory()
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
def test_the_devices_cache_is_handed_back() -> None:
    block = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_reserved()
    del block
    free_memory()
    assert torch.cuda.memory_reserved() <= before - 2**28
