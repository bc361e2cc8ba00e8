"""How the nodes of a run meet; those of an elastic run come, fall silent, leave and come back while it goes on."""
