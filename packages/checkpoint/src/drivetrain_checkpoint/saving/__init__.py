"""Save checkpoints as transactions, also in the background, and delete old ones."""
