"""The private name of torch's modules that this package uses; tests/weights/test_compat.py tests it.

docs/design/platforms.md lists it. It is the same in torch 2.9 to 2.15.
"""

# The methods by which torch's modules fill their parameters; nn.MultiheadAttention has the private one.
RESET_METHODS = ("reset_parameters", "_reset_parameters")
