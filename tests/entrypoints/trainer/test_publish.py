"""The model at the end: what is written, and the upload with the hub's real client to a server of our own."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS, TINY, texts, train

assert ENTRYPOINTS
pytestmark = pytest.mark.train


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files asks for; every request is kept."""

    seen: list[tuple[str, str | None, bytes]]

    def log_message(self, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        root = f"http://127.0.0.1:{self.server.server_port}"
        if self.path.endswith("/repos/create"):
            self.answer({"url": f"{root}/someone/tiny", "name": "someone/tiny"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        else:
            self.answer(
                {"commitOid": "0" * 40, "commitUrl": f"{root}/someone/tiny/commit/{'0' * 40}", "hookOutput": ""}
            )

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization"), b""))
        self.answer(
            {"id": "someone/tiny", "sha": "0" * 40, "siblings": [], "private": False, "tags": [], "downloads": 0}
        )

    def answer(self, body: object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_the_model_is_uploaded_as_it_was_saved(tmp_path: Path, hub):
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from trainer import publish; from pathlib import Path;"
        "publish.check_token(); print(publish.push(Path(sys.argv[2]), 'someone/tiny', True))"
    )
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--max_steps", "2"]
    train(tmp_path / "run", args)
    model = tmp_path / "run" / "model"
    env = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": "hf_secret",
        "HF_HUB_OFFLINE": "0",
    }
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(ENTRYPOINTS), str(model)],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "/someone/tiny" in done.stdout
    assert {token for _, token, body in hub.seen if body} == {"Bearer hf_secret"}
    [created] = [json.loads(body) for path, _, body in hub.seen if path.endswith("/repos/create")]
    assert created["name"] == "tiny" and (created.get("private") or created.get("visibility") == "private")
    [commit] = [body for path, _, body in hub.seen if "/commit/" in path]
    sent = {}
    for line in commit.splitlines():
        row = json.loads(line)
        if row["key"] == "file":
            sent[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
    assert sent == {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= sent.keys()
