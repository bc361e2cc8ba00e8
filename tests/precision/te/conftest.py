import pytest
import torch


@pytest.fixture
def layers_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Transformer Engine make its layers on a machine without a GPU.

    It refuses to where torch sees no CUDA device, although it then makes them on any device, meta too: only a forward
    needs CUDA. What torch is asked is a public function, and all else is the real library.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
