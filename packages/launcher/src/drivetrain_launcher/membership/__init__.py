"""Which nodes take part in an elastic run: they come, fall silent, leave and come back while the run goes on."""
