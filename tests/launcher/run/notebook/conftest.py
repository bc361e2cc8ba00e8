"""Notebooks for tests: a real Jupyter kernel, driven by nbclient as papermill and Jupyter Book do."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

# The ranks start at once, by the variables that `python` has.
FIRST_CELL = """
import os, sys, time
sys.executable = {python!r}
os.environ.clear()
os.environ.update({environment!r})
import torch
import torch.distributed as dist
from drivetrain_launcher import LaunchError, RankFailedError, Workers, debug_launcher, notebook_launcher
(torch.ones(512, 512) @ torch.ones(512, 512)).sum()  # threads that no fork would have
"""


class Cell:
    """What a cell has shown, by its outputs as in a notebook's file: streams, exceptions, and PNGs in base64."""

    def __init__(self, outputs: list[dict]) -> None:
        self.outputs = outputs
        streams = [each for each in outputs if each["output_type"] == "stream"]
        self.stdout = "".join(each["text"] for each in streams if each["name"] == "stdout")
        self.stderr = "".join(each["text"] for each in streams if each["name"] == "stderr")
        self.errors = [each for each in outputs if each["output_type"] == "error"]
        data = [each.get("data", {}) for each in outputs]
        self.images = [each["image/png"] for each in data if "image/png" in each]


class Notebook:
    """A running notebook, by the client of its kernel."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, source: str) -> Cell:
        """Run a new cell to its end."""
        from nbformat.v4 import new_code_cell

        cell = new_code_cell(source)
        self._client.nb.cells.append(cell)
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return Cell(cell.outputs)

    def run_and_stop(self, source: str, ready: Callable[[], bool]) -> Cell:
        """Run a new cell, and press the stop button once it is ready."""

        def press() -> None:
            deadline = time.monotonic() + 100
            while not ready() and time.monotonic() < deadline:
                time.sleep(0.1)
            asyncio.run(self._client.km.interrupt_kernel())

        presser = Thread(target=press)
        presser.start()
        try:
            return self.run(source)
        finally:
            presser.join()

    def end(self, how: str) -> None:
        """Kill the kernel, as the system does when memory runs out, or restart it, as the button does."""
        from nbclient.util import run_sync

        if how == "killed":
            run_sync(self._client.km.signal_kernel)(signal.SIGKILL)
        else:
            run_sync(self._client.km.restart_kernel)(now=False)


@pytest.fixture
def opened_notebook() -> Callable[[Path, str], AbstractContextManager[Notebook]]:
    """Open a notebook of one's own, in a folder, with a Python for its ranks."""
    return _opened_notebook


@contextmanager
def _opened_notebook(folder: Path, python: str) -> Iterator[Notebook]:
    pytest.importorskip("ipykernel", reason="comes with the dev dependencies")
    nbclient = pytest.importorskip("nbclient", reason="comes with the dev dependencies")
    from nbformat.v4 import new_notebook
    from traitlets.config import Config

    # And not ports, which Jupyter picks seconds before the kernel listens: ranks of other tests may take one.
    config = Config(KernelManager={"transport": "ipc", "ip": str(folder / "kernel")})
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        new_notebook(),
        timeout=150,
        allow_errors=True,
        kernel_name="python3",
        resources=resources,
        config=config,
    )
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with client.setup_kernel():
        notebook = Notebook(client)
        assert not notebook.run(FIRST_CELL.format(python=python, environment=environment)).errors
        yield notebook


@pytest.fixture(scope="module")
def notebook_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `notebook`."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def notebook(notebook_folder: Path, python: str) -> Iterator[Notebook]:
    """A notebook that the tests of a file share, each in cells of its own."""
    with _opened_notebook(notebook_folder, python) as notebook:
        yield notebook
