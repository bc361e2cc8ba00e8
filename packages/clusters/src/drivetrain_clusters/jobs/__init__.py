"""Submitted jobs: their records, their output, the commands that follow and cancel them."""
