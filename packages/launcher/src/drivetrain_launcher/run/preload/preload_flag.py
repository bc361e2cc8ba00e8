"""The flag by which the launcher tells a worker to preload; in a file of its own since every worker reads it."""

# The first argument of a worker that ranks are forked off; its connection and modules follow.
PRELOAD_FLAG = "--preload="
