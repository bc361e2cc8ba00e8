"""Run a model whose weights are kept elsewhere: fetch them ahead of their use, release them after it."""
