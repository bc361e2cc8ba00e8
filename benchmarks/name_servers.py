"""Leave the machine's name servers out of what is measured."""

import ctypes
import os
import subprocess
from pathlib import Path

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of sched.h
_NAME_SERVERS = Path("/etc/resolv.conf")


def leave_name_servers() -> bool:
    """Have this process and its children ask no name server, by a mount that nobody else sees; True if that worked.

    torch looks up the name of each connection's other end. What is to be measured is the store.
    """
    if os.geteuid() or not _NAME_SERVERS.exists() or ctypes.CDLL(None).unshare(_NEW_MOUNTS):
        return False
    commands = (["--make-rprivate", "/"], ["--bind", os.devnull, str(_NAME_SERVERS)])
    return not any(subprocess.run(["mount", *words], check=False).returncode for words in commands)
