"""Publish exports on the Hugging Face Hub with a card of their run, and read them from there."""
