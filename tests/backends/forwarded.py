"""What `cloudtrain forward` must do on each backend that has it: an HTTP server in the rank is reached from here."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from cloudtrain.events import State
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S, wait_for

COMMAND = [sys.executable, "-m", "cloudtrain.cli"]
PAGE = 300_000  # bytes: more than fits into one message, or into the buffers on the way
SERVES = f"""\
import http.server, os

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"b" * {PAGE})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body[::-1])

    def log_message(self, *_): pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print("port", server.server_port, flush=True)
server.serve_forever()
"""


def check_forward(folder: Path, target: str, *more: str) -> None:
    """Submit a script that serves HTTP on its own loopback address, and reach it by `cloudtrain forward`."""
    source = folder / "serves"
    source.mkdir()
    (source / "serves.py").write_text(SERVES)
    words = ["submit", "serves.py", "-t", target, "--set", "environment.requirements=none", *more, "--json"]
    sent = subprocess.run([*COMMAND, *words], cwd=source, capture_output=True, text=True, timeout=WAIT_S)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    run = Run.find(json.loads(sent.stdout.splitlines()[-1])["run_id"])
    try:
        port = wait_for(lambda: port_of(run), "the server")
        wait_for(lambda: run.state is State.RUNNING, "its state, which a platform that is asked rarely says later")
        with forwarded(run, f"{port}:0") as (address, _):
            body = bytes(range(256)) * 1200
            for _ in range(2):
                assert urllib.request.urlopen(f"http://{address}/", timeout=WAIT_S).read() == b"b" * PAGE
            posted = urllib.request.urlopen(f"http://{address}/", data=body, timeout=WAIT_S).read()
            assert posted == body[::-1]
            with ThreadPoolExecutor(6) as pool:  # as many connections as a browser opens
                pages = pool.map(
                    lambda _: urllib.request.urlopen(f"http://{address}/", timeout=WAIT_S).read(), range(6)
                )
                assert [len(page) for page in pages] == [PAGE] * 6
        with forwarded(run, "1:0") as (address, errors):
            try:
                urllib.request.urlopen(f"http://{address}/", timeout=WAIT_S)
                raise AssertionError("nothing listens on port 1")
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            line = errors.readline()
            assert line.startswith("node 0: ") and "port 1" in line, line
        assert [event.data["port"] for event in run.store.events(run.run_id, "forward")] == [port, 1]
    finally:
        run.cancel()
        run.wait(WAIT_S)


def port_of(run: Run) -> int:
    """Return the port that the script has printed, 0 before."""
    lines = subprocess.run([*COMMAND, "logs", run.run_id], capture_output=True, text=True, timeout=WAIT_S).stdout
    return next((int(line.rpartition(" ")[2]) for line in lines.splitlines() if "port " in line), 0)


@contextmanager
def forwarded(run: Run, ports: str) -> Iterator[tuple]:
    """Yield the address here and the command's standard error; Ctrl-C ends it with code 0."""
    process = subprocess.Popen(
        [*COMMAND, "forward", run.run_id, ports, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        address = json.loads(line).get("address", line)
        assert address.startswith("127.0.0.1:")
        yield address, process.stderr
        process.send_signal(2)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()
