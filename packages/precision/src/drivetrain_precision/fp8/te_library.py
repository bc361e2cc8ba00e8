"""The import of Transformer Engine, an optional library that is compiled when it is installed."""

from importlib import import_module
from typing import Any

import torch as torch  # loads NCCL, which Transformer Engine's core wants to find loaded


def transformer_engine(module: str = "pytorch") -> Any:
    """Import a module of Transformer Engine; ImportError, with the library's error and the install command."""
    try:
        return import_module(f"transformer_engine.{module}")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # Beside a plain ImportError: a shared library that is not found, an extension that was not compiled, and
        # versions of its three distributions that differ.
        raise ImportError(
            f"Transformer Engine cannot be imported ({type(error).__name__}: {error}): "
            "pip install --no-build-isolation 'drivetrain-precision[te]' compiles it for the torch that is installed"
        ) from error
