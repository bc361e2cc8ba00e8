#!/bin/sh
# Runs a command on this machine as `ssh HOST COMMAND` does on another: in a fresh environment, read by a shell.
shift
exec env -i PATH="$PATH" sh -c "$*"
