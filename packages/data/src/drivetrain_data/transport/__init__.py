"""Send batches from one rank to the others."""
