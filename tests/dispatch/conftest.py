"""Fixtures for the tests of dispatching."""

import copy

import pytest
import torch
from torch import nn

from dispatch.models import Stack, streamed


@pytest.fixture
def stack() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Stack().eval()
    return streamed(copy.deepcopy(model)), model
