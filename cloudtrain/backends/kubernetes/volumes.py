"""Download files from persistent volume claims: start a pod that mounts and serves them, then delete it."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloudtrain.backends.kubernetes import fetch_pod
from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.jobs import KubeJobs
from cloudtrain.backends.kubernetes.status import container_state, pod_reason
from cloudtrain.backends.store.download import StoredObject, download_all
from cloudtrain.errors import BackendError

START_S = 600.0  # timeout for the pod to start: a node may have to be added, the image pulled
Object = dict[str, Any]


class KubeVolumes:
    """Reads the volumes of Jobs of one kubeconfig context. Every call blocks; raises BackendError."""

    def __init__(self, api: KubeApi, jobs: KubeJobs, pause_s: float) -> None:
        self._api, self._jobs, self._pause_s = api, jobs, pause_s

    def download(self, job: Object, base: str, folders: tuple[str, ...], into: Path) -> None:
        """Download folders below a path in the Job's pods; files with the same size and time are skipped."""
        into.mkdir(parents=True, exist_ok=True)
        secret = secrets.token_urlsafe(24)
        with self._fetch_pod(job, base, hashlib.sha256(secret.encode()).hexdigest()) as proxy_path:
            headers = {fetch_pod.AUTH_HEADER: secret}
            entries = [
                entry for folder in folders for entry in self._list_files(proxy_path, {"folder": folder}, headers)
            ]
            download_all((self._stored(proxy_path, headers, *entry) for entry in entries), into)

    def _stored(self, proxy_path: str, headers: dict[str, str], name: str, size: int, changed_ns: int) -> StoredObject:
        def read(first: int, last: int) -> Iterator[bytes]:
            query = {"name": name}
            return self._api.stream(f"{proxy_path}/file", f"{name} cannot be read", query, headers, first, last)

        def refresh() -> StoredObject | None:
            query = {"folder": name.partition("/")[0]}
            entries = self._list_files(proxy_path, query, headers)
            now = next((entry for entry in entries if entry[0] == name), None)
            return self._stored(proxy_path, headers, *now) if now else None

        version = f"{size}-{changed_ns}"
        return StoredObject(name, f"the claim's {name}", size, version, changed_ns, read, lambda _: None, refresh)

    @contextmanager
    def _fetch_pod(self, job: Object, base: str, secret_sha256: str) -> Iterator[str]:
        """Run a pod that serves the files below `base`, and yield its proxy path on the API server."""
        namespace = str(job["metadata"]["namespace"])
        name = f"{job['metadata']['name']}-fetch-{secrets.token_hex(3)}"
        pods = f"/api/v1/namespaces/{namespace}/pods"
        manifest = fetch_pod.build_pod(job, name, base, secret_sha256)
        try:
            self._api.call(
                "POST",
                pods,
                "the cluster refuses the pod that reads the persistent volume claim",
                body=manifest,
                accept=(409,),
            )
            self._wait_until_started(namespace, name)
            yield f"{pods}/{name}:{fetch_pod.PORT}/proxy"
        finally:
            body = {"gracePeriodSeconds": 0}
            self._api.call(
                "DELETE",
                f"{pods}/{name}",
                "the pod that reads the persistent volume claim could not be deleted",
                body=body,
                accept=(404,),
            )

    def _wait_until_started(self, namespace: str, name: str) -> None:
        deadline = self._api.clock.monotonic() + START_S
        while True:
            pod = self._api.get(f"/api/v1/namespaces/{namespace}/pods/{name}", "the pod cannot be read")
            state = container_state(pod) if pod else {}
            if pod is None or "exitCode" in state:
                raise BackendError(
                    f"the pod that reads the persistent volume claim has ended: {state.get('message', 'it is gone')}"
                )
            if state.get("startedAt"):
                return
            if self._api.clock.monotonic() >= deadline:
                reason = pod_reason(pod) or "".join(
                    self._jobs.newest_notes(namespace, [str(pod["metadata"]["uid"])]).values()
                )
                raise BackendError(
                    f"the pod {name}, which reads the persistent volume claim, does not start: "
                    f"{reason or 'Kubernetes gives no reason'}",
                    f"kubectl get events -n {namespace} says more",
                )
            self._api.clock.sleep(self._pause_s)

    def _list_files(self, proxy_path: str, query: dict[str, str], headers: dict[str, str]) -> Any:
        """Download the file list, retrying until the pod's server listens."""
        deadline = self._api.clock.monotonic() + START_S / 10
        while True:
            try:
                chunks = self._api.stream(f"{proxy_path}/list", "the claim cannot be listed", query, headers)
                return json.loads(b"".join(chunks))
            except KubeError as error:
                if error.status not in (502, 503, 504) or self._api.clock.monotonic() >= deadline:
                    raise
