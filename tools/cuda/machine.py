"""What is there to run on, as JSON: versions, cards, and which of the named libraries are missing.

A process of its own, since it imports torch: `python machine.py LIBRARY ...`, by the names that they are imported by.
`benchmarks/cuda`, where `card` is, must be on PYTHONPATH.
"""

import json
import platform
import sys
from importlib.util import find_spec

import torch
from card import describe


def _is_there(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # a folder of that name on the path is no library


print(
    json.dumps(
        {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cards": [describe(torch.device("cuda", index)) for index in range(torch.cuda.device_count())],
            "missing": [name for name in sys.argv[1:] if not _is_there(name)],
        }
    )
)
