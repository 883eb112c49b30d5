"""Reading the logs of an attempt's pods, and on from its output where these are gone."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudtrain.backends.kubernetes.client import KubeApi
from cloudtrain.backends.kubernetes.jobs import KubeJobs
from cloudtrain.backends.kubernetes.log_merge import Merge, NodeLog, Start
from cloudtrain.backends.kubernetes.request import CONTAINER, OUTPUT, UNPACK
from cloudtrain.backends.kubernetes.status import age, container, marks, node_of, status_of
from cloudtrain.backends.kubernetes.store import KubeStore
from cloudtrain.backends.kubernetes.volumes import KubeClaims
from cloudtrain.errors import BackendError
from cloudtrain.events import LogLine

Object = dict[str, Any]


class KubeLogs:
    """The logs of Jobs of one context. Every call blocks; raises BackendError."""

    def __init__(self, api: KubeApi, jobs: KubeJobs, store: KubeStore, claims: KubeClaims, pause_s: float) -> None:
        self._api, self._jobs, self._store, self._claims, self._pause_s = api, jobs, store, claims, pause_s
        self._read_for: dict[str, str | None] = {}  # job's uid -> the pod for whose sake its claim was read last
        self._brought: dict[str, dict[str, str]] = {}  # job's uid -> path below its output -> text, of logs on a claim

    def follow(self, handle: str, *, follow: bool, after: str | None) -> Iterator[LogLine]:
        """Yield the lines of all nodes behind a cursor; to the end, or with what has come so far."""
        merge: Merge | None = None
        while True:
            job = self._jobs.job(handle)
            if job is None:
                return
            merge = merge or Merge(int(job["spec"]["completions"]), after)
            pods = self._jobs.pods(handle)
            final = status_of(job, pods).state.final  # before reading: what is final has said everything
            for node in merge.nodes:
                own = [pod for pod in pods if node_of(pod) == node.node]
                yield from self._read(job, node, own, merge, final)
            if final or not follow:
                return
            time.sleep(self._pause_s)

    def _read(self, job: Object, node: NodeLog, pods: list[Object], merge: Merge, final: bool) -> Iterator[LogLine]:
        """Yield what is new of one node: of the pod that is known, and of those that followed it."""
        there = {str(pod["metadata"]["uid"]): pod for pod in pods}
        starts, kept = self._starts(job, node, there, final)
        for start in starts:
            if start.uid != node.pod.uid:
                node.begin(start)
            pod = there.get(start.uid)
            began = str((pod or job)["metadata"].get("creationTimestamp", ""))
            if pod is not None:
                # At the end all of it: a clock that went back hides lines from who asks for those since a time.
                since = node.at if node.next and not final else ""
                yield from merge.take(node.node, self._text(pod, since), began)
                if node.gap and since:
                    yield from merge.take(node.node, self._text(pod, ""), began)
            if pod is None or node.gap or (final and not container(pod)):
                kept = kept or self._kept(job, node, final)
                for name in kept:
                    if _start(name).uid == start.uid:
                        yield from merge.take(node.node, self._kept_text(job, kept[name]), began)

    def _starts(
        self, job: Object, node: NodeLog, there: dict[str, Object], final: bool
    ) -> tuple[list[Start], dict[str, str]]:
        """Return the start of a node that is known and those after it, in order, and what was asked for of its kept logs."""
        made = {
            uid: Start(_compact(pod["metadata"]["creationTimestamp"]), uid)
            for uid, pod in there.items()
            if uid == node.pod.uid or final or _speaks(pod)
        }
        told: dict[str, Start] = {}  # by the launchers' own clocks
        known = node.pod

        def order(start: Start) -> tuple[tuple[bool, str, int], str]:
            return age(there.get(start.uid), start.made), start.uid

        def before(start: Start) -> bool:
            """Return whether a start came before the one that is known; where both are gone one kind of clock decides."""
            gone = start.uid not in there and known.uid not in there
            return order(start) < order(told.get(known.uid, known) if gone else known)

        kept: dict[str, str] = {}
        if known.uid not in there and (known.uid or final or len(there) != 1):
            # A pod has to be started for reading a claim: once for each that has gone, when its successor is there.
            kept = self._kept(job, node, final or bool(known.uid and there))
        elif any(uid != known.uid and not before(start) for uid, start in made.items()):
            kept = self._kept(job, node, False)  # another one may have come and gone before it
        told |= {_start(name).uid: _start(name) for name in kept}
        new = [start for uid, start in (told | made).items() if uid == known.uid or not before(start)]
        return sorted(new, key=lambda start: (start.uid != known.uid, order(start))), kept

    def _text(self, pod: Object, since: str) -> str:
        """Return what a pod has printed, in whole lines; "" where it has not begun or is gone."""
        state, name = container(pod), CONTAINER
        if not state.get("startedAt"):
            state, name = container(pod, UNPACK), UNPACK
            if not state.get("exitCode"):
                return ""
        query = {"container": name, **({"sinceTime": since} if since else {})}
        about = pod["metadata"]
        place = f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}/log"
        status, body = self._api.call("GET", place, "the log cannot be read", query=query, fine=(400, 404))
        if status != 200:
            return ""
        text = body.decode("utf-8", "replace")
        return text if "exitCode" in state else text[: text.rfind("\n") + 1]  # the rest of a line may be on its way

    def _kept(self, job: Object, node: NodeLog, claims_too: bool) -> dict[str, str]:
        """Return name -> place of what a node's starts have kept of their logs in the output."""
        base = marks(job).get(OUTPUT, "")
        below = f"logs/{job['metadata']['name']}/node-{node.node}/"
        if "://" in base:
            return {name: f"{base}/{below}{name}/" for name in self._store.folders(f"{base}/{below}")}
        if not base or not claims_too:
            return {}
        found = self._on_claim(job, base, node.pod.uid)
        names = sorted({path[len(below) :].partition("/")[0] for path in found if path.startswith(below)})
        return {name: f"{below}{name}/" for name in names}

    def _kept_text(self, job: Object, place: str) -> str:
        if "://" in place:
            return self._store.text(place)
        found = self._brought[job["metadata"]["uid"]]
        return "".join(found[path] for path in sorted(found) if path.startswith(place))

    def _on_claim(self, job: Object, base: str, gone: str) -> dict[str, str]:
        """Return what lies in the folder of logs on a claim; nothing where it cannot be read."""
        uid = str(job["metadata"]["uid"])
        if self._read_for.setdefault(uid, None) != gone:
            self._read_for[uid] = gone
            self._brought[uid] = {}
            with tempfile.TemporaryDirectory() as name, contextlib.suppress(BackendError):
                folder = f"logs/{job['metadata']['name']}"
                self._claims.bring(job, base, (folder,), Path(name))
                files = [path for path in Path(name).rglob("*") if path.is_file()]
                texts = {str(path.relative_to(name)): path.read_text(errors="replace") for path in files}
                self._brought[uid] = texts
        return self._brought[uid]


def _speaks(pod: Object) -> bool:
    """Return whether a pod may have printed something: it began, or could not be prepared."""
    return bool(container(pod).get("startedAt") or container(pod, UNPACK).get("exitCode"))


def _start(name: str) -> Start:
    """Return the start that a folder of a kept log is of: 20261122T061500Z-<uid>."""
    made, _, uid = name.partition("-")
    return Start(made, uid)


def _compact(stamp: str) -> str:
    return str(stamp).replace("-", "").replace(":", "")
