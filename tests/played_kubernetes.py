"""The few endpoints of a Kubernetes API that jobs need, on the loopback, for the real kubectl to talk to.

A JobSet's pods wait once, run, print what the test says, and end with the exit codes that it says.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

GROUP = "jobset.x-k8s.io"
KIND = {"group": GROUP, "version": "v1alpha2", "kind": "JobSet"}
JOBSETS = f"/apis/{GROUP}/v1alpha2/namespaces/team/jobsets"
PODS = "/api/v1/namespaces/team/pods"
# An old kubectl checks fields itself, and asks for the definitions: an OpenAPI document as a message of protobuf.
# This one has its version alone (field 1), and kubectl checks no field of a kind that is not defined.
NO_DEFINITIONS = b"\x0a\x032.0"


@dataclass
class PlayedCluster:
    """What the cluster does with a JobSet, and what it was asked.

    Attributes:
        exit_codes: The exit codes of the pods, by attempt and rank.
        lines: The lines that each pod prints.
        has_jobset: Whether JobSet is installed.
        breaks_first_log: Whether the first connection to each log ends after its first line.
    """

    exit_codes: Sequence[Sequence[int]] = ((0, 0),)
    lines: Sequence[str] = ("one", "two")
    has_jobset: bool = True
    breaks_first_log: bool = False
    created: list[dict[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    attempt: int = 0
    looks: int = 0
    served: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    lock: Any = field(default_factory=Lock)

    def jobset(self) -> dict[str, Any]:
        """The JobSet with its status."""
        status: dict[str, Any] = {"restarts": self.attempt}
        codes = self.exit_codes[self.attempt]
        if self.is_over() and self.attempt == len(self.exit_codes) - 1:
            kind = "Failed" if any(codes) else "Completed"
            status["conditions"] = [{"type": kind, "status": "True", "message": "jobset is over"}]
        elif self.is_over():
            self.attempt += 1
            self.looks = 0
            status["restarts"] = self.attempt
        return {**self.created[0], "status": status}

    def is_over(self) -> bool:
        """Whether all pods of the attempt have ended."""
        return all(self.name(rank) in self.whole for rank in range(len(self.exit_codes[self.attempt])))

    def name(self, rank: int) -> str:
        return f"train-node-0-{rank}-{self.attempt:05}"

    def pods(self) -> list[dict[str, Any]]:
        """The pods of the attempt; the first look sees them wait."""
        self.looks += 1
        return [self._pod(rank, code) for rank, code in enumerate(self.exit_codes[self.attempt])]

    def _pod(self, rank: int, code: int) -> dict[str, Any]:
        state: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        if self.looks == 1:
            state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
        elif self.name(rank) in self.whole:
            state = {"terminated": {"exitCode": code, "finishedAt": f"2026-01-01T00:0{9 - rank}:00Z"}}
        phase = "Pending" if self.looks == 1 else "Running"
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name(rank),
                "namespace": "team",
                "annotations": {"batch.kubernetes.io/job-completion-index": str(rank)},
            },
            "spec": {"containers": [{"name": "launcher", "image": "x"}]},
            "status": {"phase": phase, "containerStatuses": [{"name": "launcher", "state": state}]},
        }

    def log(self, pod: str, since: str) -> str:
        """The log of a pod, with times."""
        self.served[pod] = self.served.get(pod, 0) + 1
        stamps = [f"2026-01-01T00:00:{i:02}.000000000Z" for i in range(len(self.lines))]
        shown = [
            f"{stamp} {line}\n" for stamp, line in zip(stamps, self.lines, strict=True) if stamp >= since
        ]
        if self.breaks_first_log and self.served[pod] == 1:
            return shown[0]
        self.whole.add(pod)
        return "".join(shown)

    def discovery(self, path: str) -> dict[str, Any] | None:
        """What kubectl asks before anything else: the kinds that there are, and that the server checks fields."""
        version = {"groupVersion": f"{GROUP}/v1alpha2", "version": "v1alpha2"}
        group = {"name": GROUP, "versions": [version], "preferredVersion": version}
        patch = {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "responses": {},
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": KIND,
        }
        api = f"apis/{GROUP}/v1alpha2"
        return {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [group] if self.has_jobset else [],
            },
            f"/{api}": _resources(f"{GROUP}/v1alpha2", {"jobsets": "JobSet"}),
            "/api/v1": _resources("v1", {"pods": "Pod", "pods/log": "Pod"}),
            "/openapi/v3": {"paths": {api: {"serverRelativeURL": f"/openapi/v3/{api}?hash=1"}}},
            f"/openapi/v3/{api}": {
                "openapi": "3.0.0",
                "info": {"title": "Kubernetes", "version": "1"},
                "components": {"schemas": {}},
                "paths": {f"/{api}/namespaces/{{namespace}}/jobsets/{{name}}": {"patch": patch}},
            },
        }.get(path)


def _resources(version: str, kinds: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [
            {
                "name": name,
                "singularName": "",
                "namespaced": True,
                "kind": kind,
                "verbs": ["get", "list", "create"],
            }
            for name, kind in kinds.items()
        ],
    }


def _status(code: int, reason: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure" if code >= 400 else "Success",
        "reason": reason,
        "code": code,
        "message": f"played: {reason}",
    }


def _encoded(found: Any) -> tuple[str, bytes]:
    """The type and the bytes of an answer."""
    if isinstance(found, bytes):
        return "application/com.github.proto-openapi.spec.v2.v1.0+protobuf", found
    if isinstance(found, str):
        return "text/plain", found.encode()
    return "application/json", json.dumps(found).encode()


def _handler(cluster: PlayedCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            with cluster.lock:
                code, found = respond(cluster, self.command, self.path, body)
            kind, text = _encoded(found)
            self.send_response(code)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def do_DELETE(self) -> None:
            self.answer()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def respond(cluster: PlayedCluster, method: str, target: str, body: bytes) -> tuple[int, Any]:
    """The answer to a request: its code, and text, data or a message."""
    path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
    if path == "/openapi/v2":
        return 200, NO_DEFINITIONS
    if (found := cluster.discovery(path)) is not None:
        return 200, found
    if (method, path) == ("POST", JOBSETS):
        if cluster.created:
            return 409, _status(409, "AlreadyExists")
        made = json.loads(body)
        made["metadata"]["namespace"] = "team"
        cluster.created.append(made)
        return 201, made
    if path == f"{JOBSETS}/train" and cluster.created and not cluster.deleted:
        if method == "DELETE":
            cluster.deleted.append("train")
            return 200, _status(200, "")
        return 200, cluster.jobset()
    if path == PODS:
        return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": cluster.pods()}
    if path.startswith(PODS) and path.endswith("/log"):
        return 200, cluster.log(path.split("/")[-2], (query.get("sinceTime") or [""])[0])
    return 404, _status(404, "NotFound")


@contextmanager
def played_kubernetes(cluster: PlayedCluster, home: Path) -> Iterator[dict[str, str]]:
    """Serve a played cluster, and yield the variables with which kubectl finds it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cluster))
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    home.mkdir(exist_ok=True)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "played",
        "contexts": [{"name": "played", "context": {"cluster": "played", "user": "me", "namespace": "team"}}],
        "clusters": [{"name": "played", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "me", "user": {}}],
    }
    (home / "config").write_text(json.dumps(config))
    try:
        yield {"KUBECONFIG": str(home / "config"), "HOME": str(home)}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
