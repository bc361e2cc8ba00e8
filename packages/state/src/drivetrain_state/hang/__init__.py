"""Detect a hang, ask every rank for its position, and report the likely culprit."""
