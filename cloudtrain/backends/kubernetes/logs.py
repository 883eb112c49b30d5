"""Read the logs of an attempt: from its pods, or from the logs saved in its output when the pods are gone."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudtrain.backends.http import ANSWER_BYTES
from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.jobs import KubeJobs
from cloudtrain.backends.kubernetes.kinds import count_nodes
from cloudtrain.backends.kubernetes.log_merge import LogMerger, NodeLog, PodStart, split_lines
from cloudtrain.backends.kubernetes.names import CONTAINER, OUTPUT, UNPACK
from cloudtrain.backends.kubernetes.status import container_state, creation_order, get_annotations, node_rank, status_of
from cloudtrain.backends.kubernetes.volumes import KubeVolumes
from cloudtrain.backends.store.open import Clients
from cloudtrain.errors import BackendError, LogDenied
from cloudtrain.events import LogLine

Object = dict[str, Any]


class KubeLogs:
    """Reads the logs of Jobs of one kubeconfig context. Every call blocks; raises BackendError."""

    def __init__(self, api: KubeApi, jobs: KubeJobs, stores: Clients, volumes: KubeVolumes, pause_s: float) -> None:
        self._api, self._jobs, self._stores, self._volumes, self._pause_s = api, jobs, stores, volumes, pause_s
        # Job's uid -> the vanished pod for which its volume was read last
        self._volume_read_for: dict[str, str | None] = {}
        # Job's uid -> path below its output -> text, for logs saved on a volume
        self._volume_logs: dict[str, dict[str, str]] = {}

    def follow(self, handle: str, *, follow: bool, after: str | None) -> Iterator[LogLine]:
        """Yield the log lines of all nodes after a cursor; with `follow` until the job ends."""
        merger: LogMerger | None = None
        known = None if follow else self._jobs.known(handle)
        while True:
            job = known[0] if known else self._jobs.job(handle)
            if job is None:
                return
            merger = merger or LogMerger(count_nodes(job), after)
            with _denied("list pods"):
                pods = known[1] if known else self._jobs.pods(handle, job)
            final = status_of(job, pods).state.final  # checked before reading: a final job prints nothing more
            for node in merger.nodes:
                node_pods = [pod for pod in pods if node_rank(pod) == node.node]
                with _denied("get pods/log"):
                    yield from self._read_node(job, node, node_pods, merger, final)
            if final or not follow:
                return
            self._api.clock.sleep(self._pause_s)

    def _read_node(
        self, job: Object, node: NodeLog, pods: list[Object], merger: LogMerger, final: bool
    ) -> Iterator[LogLine]:
        """Yield the new lines of one node: of the pod read last, and of those that replaced it."""
        pods_by_uid = {str(pod["metadata"]["uid"]): pod for pod in pods}
        starts, saved = self._pod_starts(job, node, pods_by_uid, final)
        for start in starts:
            if start.uid != node.pod.uid:
                node.switch_pod(start)
            pod = pods_by_uid.get(start.uid)
            began = str((pod or job)["metadata"].get("creationTimestamp", ""))
            gone = pod is None
            if pod is not None:
                # At the end read all of it: if a clock was set back, `since` would hide lines.
                since = node.last_time if node.next and not final else ""
                try:
                    yield from merger.add_lines(node.node, self._pod_log(pod, since), began)
                    if node.gap and since:
                        yield from merger.add_lines(node.node, self._pod_log(pod, ""), began)
                except KubeError as error:
                    if error.status != 404:  # else it is gone since it was listed
                        raise
                    gone = True
            if gone or node.gap or (pod is not None and final and not container_state(pod)):
                saved = saved or self._saved_logs(job, node, final)
                for name in saved:
                    if _parse_log_folder(name).uid == start.uid:
                        yield from merger.add_lines(node.node, self._saved_log(job, saved[name]), began)

    def _pod_starts(
        self, job: Object, node: NodeLog, pods_by_uid: dict[str, Object], final: bool
    ) -> tuple[list[PodStart], dict[str, str]]:
        """Return the pod that was read last and the pods after it, in order, and the saved logs if they were listed."""
        pod_starts = {
            uid: PodStart(_compact_timestamp(pod["metadata"]["creationTimestamp"]), uid)
            for uid, pod in pods_by_uid.items()
            if uid == node.pod.uid or final or _may_have_output(pod)
        }
        saved_starts: dict[str, PodStart] = {}  # with times of the launchers' clocks
        current = node.pod

        def order(start: PodStart) -> tuple[tuple[bool, str, int], str]:
            return creation_order(pods_by_uid.get(start.uid), start.created_at), start.uid

        def before(start: PodStart) -> bool:
            """Return whether a pod came before the current one; if both are gone, compare times of the same clock."""
            gone = start.uid not in pods_by_uid and current.uid not in pods_by_uid
            return order(start) < order(saved_starts.get(current.uid, current) if gone else current)

        saved: dict[str, str] = {}
        if current.uid not in pods_by_uid and (current.uid or final or len(pods_by_uid) != 1):
            # Reading a volume starts a pod: do it once for each vanished pod, when its successor exists.
            saved = self._saved_logs(job, node, final or bool(current.uid and pods_by_uid))
        elif any(uid != current.uid and not before(start) for uid, start in pod_starts.items()):
            saved = self._saved_logs(job, node, False)  # another pod may have come and gone in between
        saved_starts |= {_parse_log_folder(name).uid: _parse_log_folder(name) for name in saved}
        starts = [
            start for uid, start in (saved_starts | pod_starts).items() if uid == current.uid or not before(start)
        ]
        return sorted(starts, key=lambda start: (start.uid != current.uid, order(start))), saved

    def _pod_log(self, pod: Object, since: str) -> Iterator[str]:
        """Yield the whole lines of a pod's log, none if it has not started; raises KubeError with status 404 if it is gone."""
        state, name = container_state(pod), pod.get("container", CONTAINER)
        if not state.get("startedAt") and "container" in pod:
            return  # what came before is in the log of the pod's first node
        if not state.get("startedAt"):
            state, name = container_state(pod, UNPACK), UNPACK
            if not state.get("exitCode"):
                return
        query = {"container": name, **({"sinceTime": since} if since else {})}
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
        try:
            chunks = self._api.stream(path, "the log cannot be read", query)
            # The last line of a pod that still runs may be incomplete.
            yield from split_lines(chunks, all_of_it="exitCode" in state)
        except KubeError as error:
            if error.status != 400:  # else its container has not started yet
                raise

    def _saved_logs(self, job: Object, node: NodeLog, include_volumes: bool) -> dict[str, str]:
        """Return the logs that a node's pods saved in the output: folder name -> its path or URI."""
        base = get_annotations(job).get(OUTPUT, "")
        prefix = f"logs/{job['metadata']['name']}/node-{node.node}/"
        if "://" in base:
            names = sorted(self._stores.bucket(f"{base}/{prefix}").folders())
            return {name: f"{base}/{prefix}{name}/" for name in names}
        if not base or not include_volumes:
            return {}
        texts = self._logs_on_volume(job, base, node.pod.uid)
        names = sorted({path[len(prefix) :].partition("/")[0] for path in texts if path.startswith(prefix)})
        return {name: f"{prefix}{name}/" for name in names}

    def _saved_log(self, job: Object, prefix: str) -> Iterator[str]:
        if "://" in prefix:
            files = self._stores.bucket(prefix)
            return split_lines(files.read(name, ANSWER_BYTES) or b"" for name in sorted(files.sizes("")))
        texts = self._volume_logs[job["metadata"]["uid"]]
        return iter("".join(texts[path] for path in sorted(texts) if path.startswith(prefix)).split("\n"))

    def _logs_on_volume(self, job: Object, base: str, pod_uid: str) -> dict[str, str]:
        """Return the logs saved on a volume, path -> text; {} if the volume cannot be read."""
        uid = str(job["metadata"]["uid"])
        if self._volume_read_for.setdefault(uid, None) != pod_uid:
            self._volume_read_for[uid] = pod_uid
            self._volume_logs[uid] = {}
            with tempfile.TemporaryDirectory() as temporary, contextlib.suppress(BackendError):
                folder = f"logs/{job['metadata']['name']}"
                self._volumes.download(job, base, (folder,), Path(temporary))
                files = [path for path in Path(temporary).rglob("*") if path.is_file()]
                texts = {str(path.relative_to(temporary)): path.read_text(errors="replace") for path in files}
                self._volume_logs[uid] = texts
        return self._volume_logs[uid]


@contextlib.contextmanager
def _denied(permission: str) -> Iterator[None]:
    """Raise LogDenied where the account lacks a permission."""
    try:
        yield
    except KubeError as error:
        if error.status != 403:
            raise
        raise LogDenied(f"the log cannot be read: your account may not {permission}", error.hint) from None


def _may_have_output(pod: Object) -> bool:
    """Return whether a pod may have a log: its container started, or its init container failed."""
    return bool(container_state(pod).get("startedAt") or container_state(pod, UNPACK).get("exitCode"))


def _parse_log_folder(name: str) -> PodStart:
    """Parse the folder name of a saved log, 20261122T061500Z-<uid>."""
    created_at, _, uid = name.partition("-")
    return PodStart(created_at, uid)


def _compact_timestamp(stamp: str) -> str:
    return str(stamp).replace("-", "").replace(":", "")
