"""Where the package is installed alone, without the extra that brings torchao, these tests are left out."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchao") else ["test_*.py"]
