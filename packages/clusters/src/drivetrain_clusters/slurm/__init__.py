"""Slurm: a task's place from its step, jobs as batch scripts."""
