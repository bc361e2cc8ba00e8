"""Run a model with offloaded weights: prefetch them before their use, release them after it."""
