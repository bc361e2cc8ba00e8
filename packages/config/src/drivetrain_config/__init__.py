"""The one way settings are read: layers, precedence, sources, schema."""
