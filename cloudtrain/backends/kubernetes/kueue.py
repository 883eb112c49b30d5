"""The end of a Job that Kueue has deactivated at its total time: it stays suspended, and only its Workload says why.

https://kueue.sigs.k8s.io/docs/concepts/workload, Maximum execution time (2026-11-23): condition Evicted of the Workload,
reason DeactivatedDueToMaximumExecutionTimeExceeded, in older releases InactiveWorkload...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.names import CANCELLED, MAX_EXEC

Object = dict[str, Any]
API, JOB_UID, EXCEEDED = "/apis/kueue.x-k8s.io", "kueue.x-k8s.io/job-uid", "MaximumExecutionTimeExceeded"


def with_ends(api: KubeApi, namespace: str, jobs: Sequence[Object]) -> list[Object]:
    """Return Jobs, with the condition Failed where Kueue has ended one at its total time; blocking.

    A Job stays as it is where Workloads may not be listed.
    """
    asked = [job["metadata"]["uid"] for job in jobs if _may_be_ended(job)]
    if not asked:
        return list(jobs)
    try:
        version = (api.get(API, "Kueue does not answer") or {}).get("preferredVersion") or {}
        path = f"/apis/{version.get('groupVersion', 'kueue.x-k8s.io/v1beta1')}/namespaces/{namespace}/workloads"
        query = {"labelSelector": f"{JOB_UID} in ({','.join(asked)})"}
        workloads = (api.get(path, "the Workloads cannot be listed", query) or {}).get("items") or ()
    except KubeError as error:
        if error.status != 403:
            raise
        return list(jobs)
    ends = {each["metadata"]["labels"][JOB_UID]: end for each in workloads if (end := _end(each))}
    return [_ended(job, ends[uid]) if (uid := job["metadata"]["uid"]) in ends else job for job in jobs]


def _may_be_ended(job: Object) -> bool:
    metadata = job["metadata"]
    suspended = job["spec"].get("suspend") and CANCELLED not in (metadata.get("annotations") or {})
    return bool(suspended and MAX_EXEC in (metadata.get("labels") or {}))


def _end(workload: Object) -> Object | None:
    conditions = (workload.get("status") or {}).get("conditions") or ()
    exceeded = (each for each in conditions if each["type"] == "Evicted" and each["reason"].endswith(EXCEEDED))
    return next((each for each in exceeded if each["status"] == "True"), None)


def _ended(job: Object, end: Object) -> Object:
    status = job.get("status") or {}
    failed = {**end, "type": "Failed", "reason": "DeadlineExceeded"}
    return {**job, "status": {**status, "conditions": [*(status.get("conditions") or ()), failed]}}
