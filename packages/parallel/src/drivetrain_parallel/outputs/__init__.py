"""Outputs of which ranks hold parts, joined only where something needs the whole."""
