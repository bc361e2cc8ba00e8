"""The modules named `accelerate`: their list, their contents, and the import finder."""
