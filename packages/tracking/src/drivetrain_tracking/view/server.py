"""Serve the page and its data on the loopback address only."""

import json
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

from drivetrain_tracking.spool.files import open_regular
from drivetrain_tracking.view.answers import (
    answer_curves,
    describe_details,
    describe_differences,
    describe_run,
)
from drivetrain_tracking.view.media import DOWNLOAD, content_type_of, find_medium_file
from drivetrain_tracking.view.request import (
    Asked,
    BadRequestError,
    read_curve_question,
    read_index,
    read_query,
)
from drivetrain_tracking.view.run_collection import RunCollection
from drivetrain_tracking.view.run_index import RunIndex

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_IDLE_SECONDS = 60.0
_COPY_BYTES = 1 << 18
_PAGE_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS: Mapping[str, str] = {
    # Nothing from elsewhere, no inline script or style: text that got into the markup could still run nothing.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPAnswer:
    """The answer to a request."""

    content_type: str
    body: bytes | BinaryIO  # an open file is closed by the sender
    size_bytes: int
    status: HTTPStatus = HTTPStatus.OK


class ViewServer(ThreadingHTTPServer):
    """A server of the page, bound to 127.0.0.1."""

    daemon_threads = True
    # A second server on the port is an error, rather than one that gets every other request.
    allow_reuse_port = False

    def __init__(self, collection: RunCollection, port: int = 0) -> None:
        self.collection = collection
        self.page: dict[str, tuple[bytes, str]] = {}  # path -> content, type
        for file in files("drivetrain_tracking.view").joinpath("page").iterdir():
            if (kind := _PAGE_TYPES.get(Path(file.name).suffix)) is not None:
                self.page[f"/{file.name}"] = file.read_bytes(), f"{kind}; charset=utf-8"
        self.page["/"] = self.page["/index.html"]
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """The values of the header Host that a request may have."""
        return tuple(f"{host}:{self.server_address[1]}" for host in (HOST, "localhost"))

    def server_bind(self) -> None:
        """Bind without the base class's look-up of the machine's name, which may contact a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a browser drops when its page is closed; print other errors."""
        if isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            logger.debug("a browser dropped its connection", exc_info=True)
        else:
            super().handle_error(request, client_address)

    def answer(self, target: str) -> HTTPAnswer:
        """Return the answer to a GET of a target, such as "/api/runs"."""
        # A target is a path here: no parser of whole addresses can stumble.
        path, _, query = target.partition("?")
        if (found := self.page.get(path)) is not None:
            return _answer_bytes(*found)
        runs = self.collection.runs
        try:
            asked = read_query(query)
            if path == "/api/runs":
                return _answer_json({"runs": [describe_run(index, run) for index, run in enumerate(runs)]})
            if path == "/api/curves":
                return _answer_json(answer_curves(runs, read_curve_question(asked)))
            if path == "/api/details":
                return _answer_json(describe_details(_run_of(runs, asked, "run")))
            if path == "/api/differences":
                first, second = _run_of(runs, asked, "first"), _run_of(runs, asked, "second")
                return _answer_json(describe_differences(first, second))
            if path == "/media":
                return _answer_medium(_run_of(runs, asked, "run"), read_index(asked, "medium"))
        except BadRequestError as error:
            return _answer_json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        return _answer_json({"error": "there is nothing at this address"}, HTTPStatus.NOT_FOUND)


class _Handler(BaseHTTPRequestHandler):
    """The handler of one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "drivetrain"
    sys_version = ""
    timeout = _IDLE_SECONDS
    server: ViewServer  # pyright: ignore[reportIncompatibleVariableOverride] no other server makes one

    def do_GET(self) -> None:
        """Answer a request; refuse foreign host names that lead to this server (DNS rebinding)."""
        if self.headers.get("Host") in self.server.allowed_hosts:
            self._send(self.server.answer(self.path))
        else:
            refusal = {"error": "open this page at the address that was printed"}
            self._send(_answer_json(refusal, HTTPStatus.FORBIDDEN))

    def _send(self, answer: HTTPAnswer) -> None:
        self.send_response(answer.status)
        for name, value in {**_HEADERS, "Content-Type": answer.content_type}.items():
            self.send_header(name, value)
        if answer.content_type == DOWNLOAD:
            self.send_header("Content-Disposition", "attachment")
        self.send_header("Content-Length", str(answer.size_bytes))
        self.end_headers()
        if isinstance(answer.body, bytes):
            self.wfile.write(answer.body)
            return
        with answer.body:
            # As many bytes as announced; of a file that shrinks meanwhile, what is there, and the end.
            missing_bytes = answer.size_bytes
            while missing_bytes > 0 and (part := answer.body.read(min(_COPY_BYTES, missing_bytes))):
                self.wfile.write(part)
                missing_bytes -= len(part)
        self.close_connection = self.close_connection or missing_bytes > 0

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests, to debug the page, instead of printing them."""
        logger.debug(format, *args)


def _run_of(runs: Sequence[RunIndex], asked: Asked, name: str) -> RunIndex:
    index = read_index(asked, name)
    if index >= len(runs):
        raise BadRequestError(f"{name}={index}: there are {len(runs)} runs")
    return runs[index]


def _answer_medium(run: RunIndex, index: int) -> HTTPAnswer:
    """Return the file of a medium, identified only by its number."""
    with run.lock:
        media = run.facts.media
        named = media[index].file if index < len(media) else None
    path = None if named is None else find_medium_file(run.place.path.parent, named)
    if path is None:
        return _answer_json({"error": "the run's folder has no such file"}, HTTPStatus.NOT_FOUND)
    try:
        size_bytes = path.stat().st_size
        file = os.fdopen(open_regular(path), "rb")
    except OSError as error:
        return _answer_json({"error": f"the file cannot be read: {error.strerror}"}, HTTPStatus.NOT_FOUND)
    return HTTPAnswer(content_type=content_type_of(path), body=file, size_bytes=size_bytes)


def _answer_json(value: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> HTTPAnswer:
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:  # a configuration with an infinity, which browsers do not parse: it becomes a string
        text = json.dumps(json.loads(json.dumps(value), parse_constant=str))
    return _answer_bytes(text.encode(), "application/json", status)


def _answer_bytes(body: bytes, content_type: str, status: HTTPStatus = HTTPStatus.OK) -> HTTPAnswer:
    return HTTPAnswer(status=status, content_type=content_type, body=body, size_bytes=len(body))
