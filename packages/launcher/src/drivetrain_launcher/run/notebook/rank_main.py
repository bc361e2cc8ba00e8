"""The program of each rank of a notebook: wait for a call, run it, say how it ended, and wait for the next one."""

import faulthandler
import gc
import io
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

from drivetrain_config import environ
from drivetrain_launcher.run.notebook.call_messages import CallSetup, Failed
from drivetrain_launcher.run.notebook.rank_channel import (
    CHANNEL_VARIABLE,
    FIGURE_BACKEND,
    Message,
    RankChannel,
    new_content,
    view_content,
)
from drivetrain_launcher.run.notebook.rank_state import (
    free_memory,
    leave_groups,
    to_environment,
    user_modules,
)
from drivetrain_launcher.run.orphan_watch import watch_owner


def main(number: int) -> None:
    """Serve the notebook until it says `END` or ends.

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
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        channel.send(Message.BEGAN)
        with content:
            function, args = unpack(view_content(content))
        value = _run(function, args)
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


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        value = function(*args)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None  # the function's own way to end early
    if FIGURE_BACKEND.removeprefix("module://") in sys.modules:
        from drivetrain_launcher.run.notebook.figure_backend import show

        show()
    return value


def _describe(error: BaseException) -> Failed:
    from drivetrain_launcher.run.failures import format_for_user

    error.with_traceback(_frames_of_function(error.__traceback__))
    line = "".join(traceback.format_exception_only(error)).strip()
    return Failed(line=line, traceback=format_for_user(error), exception=_pickled(error), time=time.time())


def _frames_of_function(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the leading frames of this file; all of it if there are no others."""
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename == __file__:
        rest = rest.tb_next
    return rest or frames


def _pickled(error: BaseException) -> bytes | None:
    from drivetrain_launcher.run.notebook.pickled_call import CallPickler

    content = io.BytesIO()
    try:
        CallPickler(content).dump(error)  # pyright: ignore[reportUnknownMemberType]
    except Exception:  # noqa: BLE001 - its text is sent in any case
        return None
    return content.getvalue()
