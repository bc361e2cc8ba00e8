"""The rules of the linter, one concern a file; `registry` lists them."""
