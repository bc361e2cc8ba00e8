"""Stands for `python` where a `PreloadedPython` is: the process is forked elsewhere, with this one's files and end.

Signals that this process gets go on to that one; if this one is killed, so is that one. It imports next to nothing,
since it is a fresh interpreter itself.
"""

import marshal
import os
import select
import signal
import socket
import sys
from contextlib import suppress

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Ask for the process, and end as it ends."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "socket"))
    files = list(_inherited(server))
    order = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ), files))
    socket.send_fds(server, [len(order).to_bytes(8, "little")], files)
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # the process may run before the handlers stand
    server.sendall(order)
    server.setblocking(False)
    # The C handler itself writes a signal's number to the server: one of Python's would run only once a wait that was
    # about to begin has ended.
    signal.set_wakeup_fd(server.fileno(), warn_on_full_buffer=False)
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    # The exit code, negative for a signal; or that only a fresh interpreter will do.
    answer = b""
    while len(answer) < 8 and select.select([server], [], []) and (more := server.recv(8 - len(answer))):
        answer += more
    if answer == b"fresh...":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    if len(answer) < 8:
        sys.exit("the process that forks others is gone")
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other action
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _inherited(server: socket.socket):
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own file is closed by now
            if int(name) != server.fileno() and os.get_inheritable(int(name)):
                yield int(name)


main()
