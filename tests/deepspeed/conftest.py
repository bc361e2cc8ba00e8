"""Every test here trains with DeepSpeed."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_operators(deepspeed_operators: None) -> None:
    """DeepSpeed's operator is compiled."""
