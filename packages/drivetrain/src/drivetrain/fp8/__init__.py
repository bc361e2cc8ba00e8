"""Models that compute in 8 bits, and the proof that they do."""
