"""What lies on the claims of a cluster, brought here: a pod that mounts them gives it out, and is deleted again."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloudtrain.backends.kubernetes import fetch_pod
from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.jobs import KubeJobs
from cloudtrain.backends.kubernetes.status import container, waits_for
from cloudtrain.errors import BackendError

START_S = 600.0  # for a node and an image
Object = dict[str, Any]


class KubeClaims:
    """Reads the claims of Jobs of one context. Every call blocks; raises BackendError."""

    def __init__(self, api: KubeApi, jobs: KubeJobs, pause_s: float) -> None:
        self._api, self._jobs, self._pause_s = api, jobs, pause_s

    def bring(self, job: Object, base: str, folders: tuple[str, ...], into: Path) -> None:
        """Copy folders below a path of the Job's pods; of a file that is here with its size and time nothing is read."""
        into.mkdir(parents=True, exist_ok=True)
        word = secrets.token_urlsafe(24)
        with self._pod(job, base, hashlib.sha256(word.encode()).hexdigest()) as place:
            headers = {fetch_pod.WORD: word}
            for folder in folders:
                with tempfile.TemporaryFile() as file:
                    self._answering(place, {"folder": folder}, headers, file)
                    file.seek(0)
                    found = json.load(file)
                for name, size, changed_ns in found:
                    self._file(f"{place}/file", str(name), int(size), int(changed_ns), headers, into)

    def _file(self, place: str, name: str, size: int, changed_ns: int, headers: dict[str, str], into: Path) -> None:
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise BackendError(f"the claim offers a file {name!r}, which is refused")
        path = into / name
        if path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == (size, changed_ns):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.{os.getpid()}")
        with open(half, "wb") as file:
            self._api.copy(place, f"{name} cannot be read", {"name": name}, headers, file)
        os.utime(half, ns=(changed_ns, changed_ns))
        half.replace(path)

    @contextmanager
    def _pod(self, job: Object, base: str, word_sha256: str) -> Iterator[str]:
        """Have a pod that gives out what lies below `base`, and yield the path by which the API server asks it."""
        space = str(job["metadata"]["namespace"])
        name = f"{job['metadata']['name']}-fetch-{secrets.token_hex(3)}"
        pods = f"/api/v1/namespaces/{space}/pods"
        wanted = fetch_pod.pod(job, name, base, word_sha256)
        try:
            self._api.call("POST", pods, "the pod that reads the claim was not accepted", body=wanted, fine=(409,))
            self._await(space, name)
            yield f"{pods}/{name}:{fetch_pod.PORT}/proxy"
        finally:
            body = {"gracePeriodSeconds": 0}
            self._api.call("DELETE", f"{pods}/{name}", "the pod that reads the claim stays", body=body, fine=(404,))

    def _await(self, space: str, name: str) -> None:
        until = time.monotonic() + START_S
        while True:
            pod = self._api.get(f"/api/v1/namespaces/{space}/pods/{name}", "the pod cannot be looked at")
            state = container(pod) if pod else {}
            if pod is None or "exitCode" in state:
                raise BackendError(f"the pod that reads the claim has ended: {state.get('message', 'it is gone')}")
            if state.get("startedAt"):
                return
            if time.monotonic() >= until:
                why = waits_for([pod]) or self._jobs.warning(space, str(pod["metadata"]["uid"]))
                raise BackendError(f"the pod that reads the claim does not start: {why or 'nothing says why'}")
            time.sleep(self._pause_s)

    def _answering(self, place: str, query: dict[str, str], headers: dict[str, str], file: Any) -> None:
        """Ask for a list until the pod's own server listens."""
        until = time.monotonic() + START_S / 10
        while True:
            try:
                return self._api.copy(f"{place}/list", "the claim cannot be listed", query, headers, file)
            except KubeError as error:
                if error.status not in (502, 503, 504) or time.monotonic() >= until:
                    raise
