"""The service that rents machines: an HTTP API whose machines are processes of this machine."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import tarfile
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cloudtrain.testing import machine

KEY = "key-of-the-account"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Service:
    """A server at `url`; `volume` is what machines share, `calls` how many requests it has had."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.volume, self.calls = folder, folder / "volume", 0
        self.volume.mkdir(parents=True)
        self._machines: dict[str, dict[str, Any]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def answer(self) -> None:
                service.calls += 1
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, data = 401, b"no such key"
                if self.headers["Authorization"] == f"Bearer {KEY}":
                    status, data = service.answer(self.command, urlsplit(self.path), body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        for process in self._processes.values():
            process.kill()

    def answer(self, method: str, url: Any, body: bytes) -> tuple[int, bytes]:
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        _, kind, *rest = url.path.split("/")
        if kind == "volume":
            return self._tar(self.volume / asked["path"])
        with self._lock:
            if method == "POST":
                return self._rent(json.loads(body))
            if not rest:
                return 200, json.dumps(list(self._machines.values())).encode()
            if rest[0] not in self._machines:
                return 404, b"no such machine"
            if method == "DELETE":
                self._stop(rest[0])
            if rest[1:] == ["log"]:
                data = (self.folder / rest[0] / "log").read_bytes()
                return 200, data[int(asked["from"]) :] if "from" in asked else data[-int(asked["last"]) :]
            return 200, json.dumps(self._machines[rest[0]]).encode()

    def _rent(self, wanted: dict[str, Any]) -> tuple[int, bytes]:
        name = wanted["name"]
        if name in self._machines:
            return 409, b"there is a machine of this name"
        source = self.folder / name / "source"
        source.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(wanted["archive"]))) as tar:
            tar.extractall(source, filter="data")
        role = {
            name: value for name, value in os.environ.items() if name.startswith("AWS_")
        }  # of the account's machines
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **role, **wanted["env"]}
        with (self.folder / name / "log").open("wb") as log:
            process = subprocess.Popen(
                wanted["argv"],
                cwd=source,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes[name] = process
        self._machines[name] = {"name": name, "state": "running", "labels": wanted["labels"], "started_at": now(),
                                "ended_at": None, "exit_code": None, "deleted": False}  # fmt: skip
        threading.Thread(target=self._wait, args=(name, process), daemon=True).start()
        return 201, b"{}"

    def _wait(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        for left in machine.processes():  # the machine is switched off
            if f"CLOUDTRAIN_ATTEMPT_ID={name}".encode() in left.environ:
                os.kill(left.pid, signal.SIGKILL)
        with self._lock:
            self._machines[name] |= {"state": "ended", "exit_code": code, "ended_at": now()}

    def _stop(self, name: str) -> None:
        if self._machines[name]["state"] == "running":
            self._machines[name] |= {"state": "stopping", "deleted": True}
            self._processes[name].terminate()

    def _tar(self, folder: Path) -> tuple[int, bytes]:
        if not folder.is_dir() or self.volume not in folder.resolve().parents:
            return 404, b"no such folder"
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as tar:
            tar.add(folder, ".")
        return 200, data.getvalue()
