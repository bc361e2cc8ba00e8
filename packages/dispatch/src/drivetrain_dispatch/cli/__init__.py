"""The command that plans the placement of a model before anything is loaded."""
