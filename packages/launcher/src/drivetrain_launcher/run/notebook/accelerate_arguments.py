"""The arguments of Accelerate's notebook_launcher that ours does not name: honoured, or refused with a remedy."""

from collections.abc import Mapping

from drivetrain_launcher.errors import LaunchError
from drivetrain_messages import suggest

_SEVERAL_MACHINES = (
    "a notebook drives the processes of its own machine; for several, put the function into a script and run "
    "`drivetrain launch --num-nodes N --node-rank I --master-addr HOST SCRIPT` on each"
)
_NO_MEETING = "the ranks of one machine meet at the notebook, on a free port or on master_port; leave it out"
# The name -> the values that ask for what happens anyway, and what to do instead of another one.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "master_addr": (("127.0.0.1", "localhost", "::1"), _SEVERAL_MACHINES),
    "node_rank": ((0,), _SEVERAL_MACHINES),
    "num_nodes": ((1,), _SEVERAL_MACHINES),
    "rdzv_backend": (("static",), _NO_MEETING),
    "rdzv_endpoint": (("",), _NO_MEETING),
    "rdzv_conf": ((None,), _NO_MEETING),
    "rdzv_id": (("none",), _NO_MEETING),
    "max_restarts": (
        (0,),
        "a failed call ends with the rank's traceback, and the notebook goes on: call again; `drivetrain launch "
        "--max-restarts N SCRIPT` restarts the ranks of a script",
    ),
    "monitor_interval": ((0.1,), "a failure is noticed as it happens, without an interval; leave it out"),
    "log_line_prefix_template": (
        (None,),
        "each line begins with `[rank N]`; leave it out, and print what else a line shall say",
    ),
}
_OWN = ("function", "args", "num_processes", "mixed_precision", "master_port")


def read_port(arguments: Mapping[str, object], *, master_port: int) -> int:
    """Check the additional arguments of `notebook_launcher`, and return the port; `master_port` is 0 if not given.

    A LaunchError says that an argument asks for something unsupported, or that the two names of the port contradict
    each other; a TypeError names the closest argument to an unknown one.
    """
    for name, value in arguments.items():
        if name == "use_port":
            continue
        if name not in _REFUSED:
            hint = suggest(name, [*_OWN, *_REFUSED, "use_port"])
            raise TypeError(f"notebook_launcher() has no argument {name!r}{hint}")
        allowed, remedy = _REFUSED[name]
        if value not in allowed:
            raise LaunchError(f"{name}={value!r}: {remedy}")
    use_port = arguments.get("use_port", 0)
    if use_port and master_port and str(use_port) != str(master_port):
        raise LaunchError(
            f"use_port={use_port!r} and master_port={master_port!r}: they are the same setting; say one of them"
        )
    name, given = ("use_port", use_port) if use_port else ("master_port", master_port)
    text = str(given)
    if isinstance(given, bool) or not text.isdecimal() or int(text) > 65535:
        raise LaunchError(f"{name}={given!r}: must be a port, 1 to 65535, or 0 for any free one")
    return int(text)
