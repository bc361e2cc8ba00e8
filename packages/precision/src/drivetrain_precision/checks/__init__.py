"""The operations in half precision: what autocast decides, what ran, and what user code should not do."""
