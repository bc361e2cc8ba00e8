"""The program of each rank of a notebook: wait for a call, run it, say how it ended, and wait for the next one."""

import faulthandler
import gc
import io
import os
import pickle
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from drivetrain_config import environ
from drivetrain_launcher.run.notebook.rank_channel import (
    CHANNEL_VARIABLE,
    FIGURE_BACKEND,
    CallSetup,
    Failed,
    Message,
    RankChannel,
    new_content,
    view_content,
)
from drivetrain_launcher.run.orphan_watch import watch_owner


def main(number: int) -> None:
    """Serve the notebook until it sends `END` or dies.

    Args:
        number: The number of the channel's socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupts are for calls
    notebook = os.getppid()
    # A socket of its own, which stays open while this process ends.
    watch = watch_owner(notebook, role="notebook", parent=notebook, connection=os.dup(number))
    os.set_inheritable(number, False)
    channel = RankChannel(socket.socket(fileno=number))
    sys.argv = [""]
    sys.stdout = sys.__stdout__ = _unbuffered(1)
    sys.stderr = sys.__stderr__ = _unbuffered(2)
    faulthandler.enable()
    import torch as torch  # while the notebook prepares the call

    gc.freeze()  # what is imported so far stays; collections after each call are fast without it
    setup: CallSetup | None = None
    while (received := channel.receive()) is not None:
        message, content = received
        if message is Message.SETUP and content is not None:
            with content:
                content.seek(0)
                setup = pickle.load(content)
        elif message is Message.CALL and content is not None and setup is not None:
            _serve(channel, setup, content)
        else:
            return
    # The notebook has ended without saying so. The watch ends all; if this process ended first,
    # its children would stay.
    watch.join()


def _unbuffered(number: int) -> io.TextIOWrapper:
    """Return a stream that writes at once, as a notebook does, in the encoding that the notebook reads."""
    raw = io.FileIO(number, "wb", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _serve(channel: RankChannel, setup: CallSetup, content: IO[bytes]) -> None:
    """Run a call in the notebook's environment, and send its outcome."""
    os.chdir(setup.folder)
    sys.path[:] = setup.search_path
    environment = {**setup.environment, CHANNEL_VARIABLE: str(channel.fileno())}
    with environ.exported(**to_environment(environ.child_environment(), environment)):
        environ.own_rank()
        message, answer = _outcome(channel, setup.rank, content)
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send(message, answer)
    if answer is not None:
        answer.close()
    free_memory()
    if message is Message.INTERRUPTED:
        raise SystemExit(0)  # others may wait for this rank, which only its end tells them


def _outcome(channel: RankChannel, rank: int, content: IO[bytes]) -> tuple[Message, IO[bytes] | None]:
    from drivetrain_launcher.run.notebook.pickled_call import pack_result, unpack

    began_ns = time.time_ns()
    value = None
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        channel.send(Message.BEGAN)
        with content:
            function, args = unpack(view_content(content))
        try:
            value = function(*args)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise  # else it is the function's own way to end early
        if FIGURE_BACKEND.removeprefix("module://") in sys.modules:
            from drivetrain_launcher.run.notebook.figure_backend import show

            show()
        leave_groups()
        answer = new_content()
        pickle.dump(user_modules(since_ns=began_ns), answer)
        pack_result(value, answer, rank=rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return Message.INTERRUPTED, None
    except BaseException as error:  # noqa: BLE001 - the notebook raises it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        answer = new_content()
        pickle.dump(_describe(error), answer)
        return Message.FAILED, answer
    return Message.RETURNED, answer


def _describe(error: BaseException) -> Failed:
    from drivetrain_launcher.run.failures import format_for_user
    from drivetrain_launcher.run.notebook.pickled_call import CallPickler

    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # leave out those of this file, unless there are no others
    error.with_traceback(frames or error.__traceback__)
    pickled = io.BytesIO()
    try:
        CallPickler(pickled).dump(error)  # pyright: ignore[reportUnknownMemberType]
        exception = pickled.getvalue()
    except Exception:  # noqa: BLE001 a user's class may raise anything; the error's text is sent in any case
        exception = None
    line = "".join(traceback.format_exception_only(error)).strip()
    return Failed(line=line, traceback=format_for_user(error), exception=exception, time=time.time())


def to_environment(current: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes that turn the current environment into the wanted one; None removes a variable."""
    removed: dict[str, str | None] = {name: None for name in current if name not in wanted}
    return removed | {name: text for name, text in wanted.items() if current.get(name) != text}


def leave_groups() -> None:
    """Destroy the process groups that the function has left behind; their store ends with the call."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def free_memory() -> None:
    """Collect objects in reference cycles, and give unused device memory back to the driver."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        module = getattr(torch, torch.accelerator.current_accelerator().type, None)
        if module is not None and module.is_initialized():
            module.empty_cache()


def user_modules(*, since_ns: int) -> dict[str, int]:
    """Return the modification time of each imported module's file, by file, without installed packages.

    The time is 0 for a file that changed after `since_ns` (nanoseconds since the epoch), perhaps after its import.
    """
    found: dict[str, int] = {}
    libraries = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or file.startswith(libraries) or not file.endswith(".py"):
            continue
        if not any(f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages")):
            try:
                changed = Path(file).stat().st_mtime_ns
            except OSError:
                continue
            found[file] = changed if changed < since_ns else 0
    return found
