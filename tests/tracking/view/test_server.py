import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from drivetrain_tracking.view.run_collection import RunCollection
from drivetrain_tracking.view.server import ViewServer
from logged_runs import BEGAN, start_line, value_lines, write_log


@contextmanager
def served(*folders: Path) -> Iterator[ViewServer]:
    collection = RunCollection(folders)
    with ViewServer(collection) as server, collection:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: ViewServer, target: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request("GET", target, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def ask(server: ViewServer, target: str) -> Any:
    status, _, body = get(server, target)
    assert status == 200, body
    return json.loads(body)


def read_runs(server: ViewServer) -> list[dict[str, Any]]:
    ends = time.monotonic() + 30
    while True:
        runs = ask(server, "/api/runs")["runs"]
        if all(run["read_bytes"] and run["read_bytes"] == run["size_bytes"] for run in runs):
            return runs
        assert time.monotonic() < ends, runs
        time.sleep(0.01)


def test_the_page_allows_nothing_from_elsewhere_and_no_inline_script(tmp_path: Path) -> None:
    write_log(tmp_path, value_lines([1]))
    with served(tmp_path) as server:
        assert server.server_address[0] == "127.0.0.1", "it listens on the loopback alone"
        assert server.address == f"http://127.0.0.1:{server.server_port}/"
        status, headers, body = get(server, "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert b"<script type=" in body
    assert body.count(b"<script") == 1
    assert b"http" not in body


def test_a_request_by_another_name_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path, value_lines([1]))
    with served(tmp_path) as server:
        port = server.server_port
        for host in ("evil.example", "127.0.0.1.evil.example", "[::1]", ""):
            assert get(server, "/api/runs", Host=f"{host}:{port}")[0] == 403, host
        assert get(server, "/api/runs", Host="127.0.0.1")[0] == 403, "without the port"
        assert get(server, "/api/runs", Host=f"localhost:{port}")[0] == 200


def test_no_path_of_a_client_leads_to_a_file(tmp_path: Path) -> None:
    write_log(tmp_path, value_lines([1]))
    paths = "/../../etc/passwd /%2e%2e/server.py //evil.example/ /page/index.html /log.jsonl"
    with served(tmp_path) as server:
        read_runs(server)
        for target in (*paths.split(), "/media?run=0&medium=7"):
            assert get(server, target)[0] == 404, target


def test_every_target_gets_an_answer_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path, value_lines([1]))
    targets = "http://[::1 //[::1 http://[::1]:x/ http://\u2100.com/ ? /?% [ * \xff"
    with served(tmp_path) as server:
        host = f"127.0.0.1:{server.server_port}"
        for target in (*targets.split(), "/" * 9000):
            with socket.create_connection(("127.0.0.1", server.server_port), 30) as client:
                head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                client.sendall(head.encode())
                status = client.makefile("rb").readline()
            assert status.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404", b"HTTP/1.1 400")), target
    assert capfd.readouterr().err == ""


def test_other_methods_are_refused(tmp_path: Path) -> None:
    write_log(tmp_path, value_lines([1]))
    with served(tmp_path) as server:
        for method in ("POST", "PUT", "DELETE"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.request(method, "/api/runs")
            assert connection.getresponse().status == 501
            connection.close()


def test_runs_are_listed_with_what_went_wrong(tmp_path: Path) -> None:
    write_log(
        tmp_path / "a",
        [start_line("first"), *value_lines(range(5)), {"event": "lost", "count": 2}],
        damaged=b"x\n",
    )
    write_log(tmp_path / "b", value_lines([1], throughput={"samples_per_second": 9.5}))
    with served(tmp_path) as server:
        one, other = read_runs(server)
    assert (one["label"], one["run"], one["num_damaged"], one["num_lost"]) == ("a", "first", 1, 2)
    assert other["metrics"] == {"loss": 1, "throughput/samples_per_second": 1}


@pytest.mark.parametrize(("axis", "first"), [("step", 0.0), ("time", BEGAN), ("relative", 0.0)])
def test_curves_are_answered_over_each_axis(tmp_path: Path, axis: str, first: float) -> None:
    write_log(tmp_path, [start_line(), *value_lines(range(1000))])
    with served(tmp_path) as server:
        read_runs(server)
        answer = ask(server, f"/api/curves?metric=loss&run=0&axis={axis}&columns=50")
        assert (answer["low"], answer["high"]) == (first, first + 999)
        (piece,) = answer["curves"][0]["pieces"]
        assert (piece["x"][0], piece["num_points"], len(piece["mean_x"])) == (first, 1000, 50)
        part = ask(
            server, f"/api/curves?metric=loss&run=0&axis={axis}&columns=50&low={first + 10}&high={first + 20}"
        )
        (piece,) = part["curves"][0]["pieces"]
        assert piece["x"] == [first + step for step in range(9, 22)], (
            "all points, and a neighbour on each side"
        )
        assert piece["mean_x"] is None


def test_a_metric_that_a_run_lacks_and_a_run_that_is_not_there_have_no_curve(tmp_path: Path) -> None:
    write_log(tmp_path, value_lines([1]))
    with served(tmp_path) as server:
        read_runs(server)
        answer = ask(server, f"/api/curves?metric={quote('<b>')}&run=0&run=99&axis=step&columns=50")
        assert (answer["curves"], answer["low"], answer["high"]) == ([], 0.0, 0.0)
        status, _, body = get(server, "/api/details?run=99")
        assert status == 400
        assert json.loads(body) == {"error": "run=99: there are 1 runs"}


def test_values_that_are_not_finite_are_marks_in_the_answer(tmp_path: Path) -> None:
    write_log(tmp_path, [*value_lines([1]), {"step": 2, "time": BEGAN + 2, "loss": "NaN"}])
    with served(tmp_path) as server:
        read_runs(server)
        answer = ask(server, "/api/curves?metric=loss&run=0&axis=step&columns=50")
    assert answer["curves"][0]["marks"] == {"nan": [2.0], "inf": [], "-inf": []}
    assert answer["high"] == 2.0


def test_media_are_served_by_number_from_the_runs_folder_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "secret").write_text("secret")
    media = {
        "picture": {"kind": "image", "file": "media/a.png", "caption": "one"},
        "escape": {"kind": "artifact", "file": "../secret"},
        "page": {"kind": "artifact", "file": "media/a.html"},
        "words": {"kind": "text", "data": "hello"},
    }
    write_log(run, value_lines([1], media=media))
    (run / "media").mkdir()
    (run / "media" / "a.png").write_bytes(b"png")
    (run / "media" / "a.html").write_bytes(b"<script>")
    with served(run) as server:
        read_runs(server)
        listed = ask(server, "/api/details?run=0")["media"]
        status, headers, body = get(server, "/media?run=0&medium=0")
        assert [one["name"] for one in listed] == list(media)
        assert (status, headers["Content-Type"], body) == (200, "image/png", b"png")
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert get(server, "/media?run=0&medium=1")[0] == 404
        _, headers, _ = get(server, "/media?run=0&medium=2")
        assert (headers["Content-Type"], headers["Content-Disposition"]) == (
            "application/octet-stream",
            "attachment",
        )
        assert get(server, "/media?run=0&medium=3")[0] == 404


def test_a_configuration_with_an_infinity_is_answered_as_json_that_browsers_parse(tmp_path: Path) -> None:
    config = b'{"event": "start", "time": 1.0, "run": "a", "config": {"most": 1e999, "least": NaN}}\n'
    (tmp_path / "log.jsonl").write_bytes(config)
    with served(tmp_path) as server:
        read_runs(server)
        assert ask(server, "/api/details?run=0")["config"] == {"most": "Infinity", "least": "NaN"}


def test_a_dropped_connection_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, [start_line(), *value_lines(range(5000))])
    with served(tmp_path) as server:
        read_runs(server)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.server_port)) as dropped:
                dropped.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                target = "/api/curves?metric=loss&run=0&axis=step&columns=4000"
                dropped.sendall(
                    f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode() * 9
                )
        assert get(server, "/")[0] == 200
    assert capsys.readouterr().err == ""


def test_differences_of_configuration_and_plan_are_answered(tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        plan = {"event": "plan", "time": BEGAN, "plan": {"backend": "fsdp", "shards": int(10 * lr)}}
        write_log(tmp_path / name, [start_line(name, {"lr": lr}), plan])
    with served(tmp_path) as server:
        read_runs(server)
        answer = ask(server, "/api/differences?first=0&second=1")
    assert answer["config"] == [{"name": "lr", "first": "0.1", "second": "0.2", "is_different": True}]
    assert [(row["name"], row["is_different"]) for row in answer["plan"]] == [
        ("backend", False),
        ("shards", True),
    ]
