"""The sections of settings: their fields, the layers that give values, and their resolution."""
