"""The types that a setting may have, and the conversion of values to them."""
