"""Training checkpoints without pickle, committed by a manifest written last."""
