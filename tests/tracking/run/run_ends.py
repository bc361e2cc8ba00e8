"""A program that logs three records and ends in the way that its first argument says; `FOLDER` is its second."""

import logging
import multiprocessing
import os
import signal
import sys
import time

from drivetrain_tracking import JSONLTracker, TrackerGroup


def train(way: str, folder: str) -> None:
    trackers = TrackerGroup([JSONLTracker(folder)])
    trackers.start("run", {"lr": 0.1})
    for step in range(3):
        trackers.log({"loss": 1.0}, step=step)
    if way == "exits in a fork":
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
    if way == "raises and is caught":
        try:
            raise ValueError("as a bug may")
        except ValueError:
            pass
    try:
        {
            "raises": raise_error, "raises in finally": raise_error, "is interrupted": raise_interrupt,
            "exits with 0": lambda: sys.exit(0), "exits with 0 in finally": lambda: sys.exit(0),
            "exits with 3": lambda: sys.exit(3), "exits with 3 in finally": lambda: sys.exit(3),
            "is terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
            "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "is gone": lambda: os._exit(0),
            "raises in a child": raise_error, "waits": lambda: time.sleep(60),
        }.get(way, lambda: None)()  # fmt: skip
    finally:
        if way.endswith("in finally"):
            trackers.finish()
    if way != "forgets":
        trackers.finish()


def raise_error() -> None:
    raise ValueError("as a bug may")


def raise_interrupt() -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    logging.basicConfig()
    if sys.argv[1] == "raises in a child":
        child = multiprocessing.get_context("spawn").Process(target=train, args=tuple(sys.argv[1:]))
        child.start()
        child.join()
    elif sys.argv[1] == "within a handler":
        try:
            raise ValueError("of an earlier try")
        except ValueError:
            train(*sys.argv[1:])
    else:
        train(*sys.argv[1:])
