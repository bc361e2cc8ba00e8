"""Changes of linear layers: the choice of layers (pure), a class that is given and taken back, and a report."""
