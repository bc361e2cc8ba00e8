"""The checks of one host: each file has a frozen measurement, the function that takes it, and a pure judgement."""
