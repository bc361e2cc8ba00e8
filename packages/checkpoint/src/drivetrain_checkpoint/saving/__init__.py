"""Save a checkpoint as a transaction, in the background, and delete the old ones."""
