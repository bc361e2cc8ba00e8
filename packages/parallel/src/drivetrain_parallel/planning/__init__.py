"""The choice of what is divided: by given patterns, a model's own plan, or sizes; each choice is tried."""
