"""Notice a hang, ask every rank where it is, and name the culprit."""
