"""The links between processes and between hosts: measured pair by pair, and judged to find the slow link or host."""
