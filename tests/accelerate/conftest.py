"""Where the real Accelerate is not installed, as where the package is tried alone, tests that hold it against it go.

pytest.importorskip would find this folder, a namespace package of the same name on the path of the tests.
"""

from importlib.util import find_spec
from pathlib import Path

found = find_spec("accelerate")
HAS_REAL = found is not None and found.origin is not None
_WITHOUT = ("test_compat.py", "test_installation.py")
collect_ignore = (
    []
    if HAS_REAL
    else [
        each.name
        for each in Path(__file__).parent.iterdir()
        if each.is_dir() or (each.name.startswith("test_") and each.name not in _WITHOUT)
    ]
)
