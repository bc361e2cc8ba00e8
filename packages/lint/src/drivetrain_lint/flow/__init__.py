"""The statements that only some ranks reach, found in the syntax tree of a script."""
