"""Watch the memory of a program, from outside it."""
