"""Where the package is installed alone, without the extra that brings torchao, tests of its recipes are left out."""

from importlib.util import find_spec

_OF_TORCHAO = (
    *("test_layer_conversion.py", "test_product_counts.py", "test_registry.py", "test_row_blocks.py"),
    *("test_frozen_products.py", "test_refused_models.py"),
    *("test_torchao_devices.py", "test_transformers_models.py"),
)
collect_ignore = [] if find_spec("torchao") else list(_OF_TORCHAO)
