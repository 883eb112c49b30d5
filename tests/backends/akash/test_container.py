"""What a container does by itself: one that is told to stop before it has begun leaves no mark and runs nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cloudtrain.backends.akash import container
from tests.conftest import WAIT_S


def test_a_container_that_is_told_to_stop_does_not_begin(tmp_path: Path) -> None:
    """An image was pulled while the lease was closed, or the pod moves before its start: the next one may train."""
    process: list[subprocess.Popen[bytes]] = []
    started, asked = threading.Event(), []

    class Store(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"GET {self.path}")
            assert started.wait(WAIT_S)
            process[0].send_signal(signal.SIGTERM)
            self.send_error(404)

        def do_PUT(self) -> None:
            asked.append(f"PUT {self.path}")
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urls = {name: f"http://127.0.0.1:{server.server_port}/{name}" for name in ("seen", "began", "source", "end")}
    env = {**os.environ, container.URLS: json.dumps(urls), "CLOUDTRAIN_ATTEMPT_ID": "x-a1", "TMPDIR": str(tmp_path)}
    process.append(subprocess.Popen([sys.executable, "-c", container.COMMAND], env=env, stdout=subprocess.PIPE))
    started.set()
    out, _ = process[0].communicate(timeout=WAIT_S)
    server.shutdown()
    assert (process[0].returncode, out, asked) == (0, b"", ["GET /seen"])
