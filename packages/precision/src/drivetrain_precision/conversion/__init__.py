"""What a change of linear layers is made of: which layers (pure), a class that is given and taken back, a report."""
