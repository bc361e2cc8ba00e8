"""The meeting of a run's nodes. Nodes of an elastic run come, fall silent, leave and come back while it goes on."""
