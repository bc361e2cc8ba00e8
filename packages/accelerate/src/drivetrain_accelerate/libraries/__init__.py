"""The installed libraries, their versions, and the devices of this host."""
