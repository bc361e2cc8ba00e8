"""Fixtures for the tests of dispatching."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dispatch.models import Stack, streamed


@pytest.fixture
def stack() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Stack().eval()
    return streamed(copy.deepcopy(model)), model


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What is as small as this waits for other threads longer than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
