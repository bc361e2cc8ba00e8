"""The files that hold settings: finding and reading them."""
