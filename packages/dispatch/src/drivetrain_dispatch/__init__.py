"""Build a model without memory, and measure it before it is loaded."""
