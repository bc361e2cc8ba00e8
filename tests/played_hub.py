"""A Hub on the loopback: as much of its HTTP API as huggingface_hub asks for when it commits and downloads models."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "a1b2c3d4e5" * 3


@dataclass
class Repository:
    """The commits of a repository, each all of its files by name."""

    private: bool
    commits: list[dict[str, bytes]] = field(
        default_factory=lambda: [{".gitattributes": b"*.bin filter=lfs\n"}]
    )

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]]:
        number = len(self.commits) - 1 if revision == "main" else int(revision, 16)
        return f"{number:040x}", self.commits[number]


@dataclass
class PlayedHub:
    """A Hub of one user, "me". Files of `.safetensors` are large: they are uploaded before the commit."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict[str, Repository])
    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    refused: list[str] = field(
        default_factory=list[str]
    )  # beginnings of the requests that fail, as "POST /api"
    requests: list[str] = field(default_factory=list[str])

    def answer(self, method: str, path: str, body: bytes, is_owner: bool) -> tuple[int, Any]:
        """Return the status of a response, and its bytes or what becomes JSON."""
        if any(f"{method} {path}".startswith(one) for one in self.refused):
            return 400, {"error": "refused by the test"}
        if path == "/api/repos/create":
            return self._create(json.loads(body)) if is_owner else (401, {"error": "Invalid credentials"})
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/objects/"):
            self.objects[path.removeprefix("/objects/")] = body
            return 200, b""
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"objects": [self._place(one) for one in json.loads(body)["objects"]]}
        name, _, rest = path.removeprefix("/api/models").lstrip("/").partition("/")
        owned, _, rest = rest.partition("/")
        repository = self.repositories.get(f"{name}/{owned}")
        if repository is None or (repository.private and not is_owner):
            return 404, {"error": "Repository not found"}
        return self._of_repository(repository, f"{name}/{owned}", unquote(rest), body)

    def _create(self, asked: Any) -> tuple[int, Any]:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if not name.startswith("me/"):
            return 403, {"error": "You don't have the rights to create a model under this namespace"}
        if name in self.repositories:
            return 409, {"url": f"{self.url}/{name}", "error": "You already created this model repo"}
        self.repositories[name] = Repository(private=asked.get("visibility") == "private")
        return 200, {"url": f"{self.url}/{name}"}

    def _place(self, one: Any) -> dict[str, Any]:
        href = f"{self.url}/objects/{one['oid']}"
        return {**one, "actions": {"upload": {"href": href}}} if one["oid"] not in self.objects else one

    def _of_repository(self, repository: Repository, name: str, rest: str, body: bytes) -> tuple[int, Any]:
        action, _, rest = (rest or "revision/main").partition("/")
        revision, _, path = rest.partition("/")
        commit, files = repository.at(revision)
        if action == "revision":
            return 200, {"id": name, "sha": commit, "private": repository.private, "siblings": []}
        if action == "tree":
            sums = {each: hashlib.sha1(files[each]).hexdigest() for each in files}
            return 200, [
                {"type": "file", "path": p, "size": len(files[p]), "oid": oid} for p, oid in sums.items()
            ]
        if action == "preupload":
            paths = [one["path"] for one in json.loads(body)["files"]]
            mode = {True: "lfs", False: "regular"}
            told = [{"path": p, "uploadMode": mode[p.endswith(".safetensors")]} for p in paths]
            return 200, {"files": [{**one, "shouldIgnore": False} for one in told]}
        if action == "resolve":
            return (200, files[path]) if path in files else (404, {"error": "Entry not found"})
        assert action == "commit", action
        changed = dict(files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changed[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del changed[value["path"]]
        repository.commits.append(changed)
        oid, _ = repository.at("main")
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid}


@contextmanager
def played_hub() -> Iterator[PlayedHub]:
    """A Hub that answers at its `url` until the block ends."""
    hub = PlayedHub()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append(f"{self.command} {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_owner = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            status, found = hub.answer(self.command.replace("HEAD", "GET"), path, body, is_owner)
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound" if "/resolve/" in path else "RepoNotFound")
            if "/resolve/" in path and status == 200:
                name, _, rest = path.removeprefix("/").partition("/resolve/")
                self.send_header("X-Repo-Commit", hub.repositories[name].at(rest.partition("/")[0])[0])
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = reply  # noqa: N815 http.server's names

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
