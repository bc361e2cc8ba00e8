"""Throughput of a training loop: rates, time by phase, model FLOPs utilisation, stragglers, a live line."""
