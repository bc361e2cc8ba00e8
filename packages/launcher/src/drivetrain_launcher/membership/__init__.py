"""The membership of an elastic run: nodes come, fall silent, leave and come back while the run goes on."""
