"""Kubernetes' official client, by hand, against the kubeconfig that is its argument: imports nothing of ours."""

from __future__ import annotations

import sys
import time

from kubernetes import client, config, dynamic, watch

config.load_kube_config(sys.argv[1])
batch, core, auth = client.BatchV1Api(), client.CoreV1Api(), client.AuthorizationV1Api()
SPACE = "default"
TALK = """
import os, socket, sys, time
rank = int(os.environ["JOB_COMPLETION_INDEX"])
port = 29380
if rank == 0:
    with socket.create_server((os.environ["POD_IP"], port)) as server:
        peer, _ = server.accept()
        print("heard", peer.recv(100).decode(), open(os.environ["FILE"]).read(), os.environ["TEXT"], flush=True)
else:
    for _ in range(600):
        try:
            with socket.create_connection((os.environ["MASTER_ADDR"], port)) as there:
                there.send(b"hello")
            break
        except OSError:
            time.sleep(0.1)
    else:
        sys.exit("nobody listens")
    print("said", os.environ["TOKEN"], flush=True)
"""
POLICY = {"rules": [
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "NotIn", "values": [0]}},
]}  # fmt: skip


def job(name: str, script: str, count: int = 1, env=(), suspend: bool = False, **pod) -> dict:
    container = {"name": "node", "image": "any:1", "command": ["python3", "-c", script], "env": list(env),
                 "terminationMessagePolicy": "FallbackToLogsOnError"}  # fmt: skip
    container |= pod.pop("container", {})
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 20, "containers": [container], **pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"completionMode": "Indexed", "completions": count, "parallelism": count, "backoffLimit": 0,
                 "podReplacementPolicy": "Failed", "podFailurePolicy": POLICY, "suspend": suspend,
                 "template": {"metadata": {"labels": {"app": name}}, "spec": spec}},
    }  # fmt: skip


def until(condition, what: str):
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def conditions(name: str) -> dict[str, str]:
    status = batch.read_namespaced_job(name, SPACE).status
    return {c.type: c.reason for c in status.conditions or () if c.status == "True"}


def pods(name: str) -> list[client.V1Pod]:
    found = core.list_namespaced_pod(SPACE, label_selector=f"batch.kubernetes.io/job-name={name}").items
    return sorted(found, key=lambda pod: pod.metadata.labels["batch.kubernetes.io/job-completion-index"])


def log(name: str, **more) -> str:
    return core.read_namespaced_pod_log(name, SPACE, _preload_content=False, **more).data.decode()  # else repr of bytes


def running(name: str, count: int = 1) -> list[client.V1Pod]:
    def all_running():
        found = pods(name)
        return found if len(found) == count and all(pod.status.phase == "Running" for pod in found) else None

    return until(all_running, f"{name} runs")


def named(listed, name: str = "pair") -> list:
    """A namespace of a real cluster is never empty: it holds kube-root-ca.crt, and default the Service kubernetes."""
    return [found for found in listed(SPACE).items if found.metadata.name == name]


def refused(status: int, call, *arguments, **more) -> str:
    try:
        call(*arguments, **more)
    except client.ApiException as error:
        assert error.status == status, (error.status, error.body)
        return str(error.body)
    raise AssertionError(f"not refused with {status}")


# Two pods that meet by the Service's names, with a ConfigMap, a Secret and the downward API; created as one should.
core.create_namespaced_secret(SPACE, {"metadata": {"name": "hf"}, "stringData": {"token": "s3cret"}})
env = [
    {"name": "TEXT", "value": "$(FIRST) $$(FIRST) $HOME"},
    {"name": "MASTER_ADDR", "value": "pair-0.pair"},
    {"name": "FILE", "value": "/code/text"},
    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
    {"name": "ABSENT", "valueFrom": {"secretKeyRef": {"name": "none", "key": "x", "optional": True}}},
]
env.insert(0, {"name": "FIRST", "value": "one"})
mount = {"container": {"volumeMounts": [{"name": "code", "mountPath": "/code"}]}}
body = job(
    "pair", TALK, 2, env, True, subdomain="pair", volumes=[{"name": "code", "configMap": {"name": "pair"}}], **mount
)
dry = batch.create_namespaced_job(SPACE, body, dry_run="All")
assert dry.metadata.uid and batch.list_namespaced_job(SPACE).items == []
made = batch.create_namespaced_job(SPACE, body)
assert made.metadata.uid and made.metadata.resource_version and made.metadata.creation_timestamp
assert "already exists" in refused(409, batch.create_namespaced_job, SPACE, body)
until(lambda: "Suspended" in conditions("pair"), "it is suspended")
for selector, count in (("app in (other, pair)", 1), ("app in (other),app", 0), ("app notin (pair)", 0), ("app", 1)):
    assert len(batch.list_namespaced_job(SPACE, label_selector=selector).items) == count, selector
assert pods("pair") == []
owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "pair", "uid": made.metadata.uid}
service = {"metadata": {"name": "pair", "ownerReferences": [owner]},
           "spec": {"clusterIP": "None", "selector": {"app": "pair"}, "publishNotReadyAddresses": True,
                    "ports": [{"port": 29380}]}}  # fmt: skip
core.create_namespaced_service(SPACE, service)
held = {"metadata": {"name": "pair", "ownerReferences": [owner]}, "immutable": True, "data": {"text": "content"}}
core.create_namespaced_config_map(SPACE, held)
assert "immutable" in refused(422, core.patch_namespaced_config_map, "pair", SPACE, {"data": {"text": "x"}})
stale = {"metadata": {"resourceVersion": "1"}, "spec": {"suspend": False}}
assert "modified" in refused(409, batch.patch_namespaced_job, "pair", SPACE, stale)
batch.patch_namespaced_job("pair", SPACE, {"spec": {"suspend": False}})
until(lambda: "Complete" in conditions("pair"), "it completes")
first, second = pods("pair")
assert log(first.metadata.name) == "heard hello content one $(FIRST) $HOME\n"
assert log(second.metadata.name, follow=True) == "said s3cret\n"
stamped = log(second.metadata.name, timestamps=True)
assert stamped.endswith("Z said s3cret\n") and first.spec.hostname == "pair-0"
assert conditions("pair")["SuccessCriteriaMet"] == "CompletionsReached"
assert refused(422, batch.patch_namespaced_job, "pair", SPACE, {"spec": {"completions": 3}})
batch.delete_namespaced_job("pair", SPACE, propagation_policy="Background")
assert refused(404, batch.read_namespaced_job, "pair", SPACE)
until(lambda: not pods("pair") and not named(core.list_namespaced_config_map), "what it owned goes too")
until(lambda: not named(core.list_namespaced_service), "its Service too")

# One pod fails: the other is deleted, and the Job says by which rule.
batch.create_namespaced_job(SPACE, job("bad", "import os, time, sys\nprint('up', flush=True)\n"
    "sys.exit(3) if os.environ['JOB_COMPLETION_INDEX'] == '1' else time.sleep(600)", 2))  # fmt: skip
until(lambda: "Failed" in conditions("bad"), "it fails")
assert conditions("bad") == {"FailureTarget": "PodFailurePolicy", "Failed": "PodFailurePolicy"}
(left,) = until(lambda: pods("bad") if len(pods("bad")) == 1 else None, "the other pod goes")
state = left.status.container_statuses[0].state.terminated
assert (state.exit_code, state.reason, state.message) == (3, "Error", "up\n")
said = batch.read_namespaced_job("bad", SPACE).status.conditions[-1].message
assert "exit code 3 matching FailJob rule at index 1" in said, said

# Eviction: a condition, SIGTERM, and the Job fails by the first rule.
LEAVE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print('up', flush=True)
time.sleep(600)
"""
batch.create_namespaced_job(SPACE, job("evicted", LEAVE))
(pod,) = running("evicted")
name = pod.metadata.name
until(lambda: log(name) == "up\n", "it is up")
core.create_namespaced_pod_eviction(name, SPACE, client.V1Eviction(metadata=client.V1ObjectMeta(name=name)))
until(lambda: "Failed" in conditions("evicted"), "it fails")
message = batch.read_namespaced_job("evicted", SPACE).status.conditions[-1].message
assert "has condition DisruptionTarget matching FailJob rule at index 0" in message, message
until(lambda: pods("evicted") == [], "the pod goes")

# Suspended again: the pods go, and their logs with them; the Job stays.
batch.create_namespaced_job(SPACE, job("paused", LEAVE))
(pod,) = running("paused")
batch.patch_namespaced_job("paused", SPACE, {"spec": {"suspend": True}})
until(lambda: pods("paused") == [], "its pod goes")
assert refused(404, core.read_namespaced_pod_log, pod.metadata.name, SPACE)
assert conditions("paused") == {"Suspended": "JobSuspended"}

# What waits says why; a deadline ends it.
wide = job(
    "wide", "pass", container={"resources": {"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8"}}}
)
wide["spec"]["activeDeadlineSeconds"] = 1
batch.create_namespaced_job(SPACE, wide)
events = until(lambda: core.list_namespaced_event(SPACE, field_selector="reason=FailedScheduling").items, "an event")
assert "Insufficient nvidia.com/gpu" in events[0].message
until(lambda: conditions("wide").get("Failed") == "DeadlineExceeded", "its deadline is over")

# A watch: what happens from a version on. A list of a version that is not there yet is refused.
version = core.list_namespaced_pod(SPACE).metadata.resource_version
batch.create_namespaced_job(SPACE, job("seen", "print('done')"))
kinds = []
for event in watch.Watch().stream(core.list_namespaced_pod, SPACE, label_selector="app=seen", resource_version=version):
    kinds.append((event["type"], event["object"].status.phase))
    if event["object"].status.phase == "Succeeded":
        break
assert kinds[0] == ("ADDED", "Pending") and kinds[-1] == ("MODIFIED", "Succeeded"), kinds
assert "Too large resource version" in refused(504, core.list_namespaced_pod, SPACE, resource_version="999999")
later = watch.Watch().stream(core.list_namespaced_pod, SPACE, resource_version="999999", timeout_seconds=1)
assert list(later) == []  # a watch waits for its version

# Lists: selectors and pages. Names, quantities and enums that a schema lets through. Reviews, no token, a wrong one.
assert [found.metadata.name for found in batch.list_namespaced_job(SPACE, label_selector="app=bad").items] == ["bad"]
page = batch.list_namespaced_job(SPACE, limit=2)
assert len(page.items) == 2 and batch.list_namespaced_job(SPACE, limit=2, _continue=page.metadata._continue).items
for wrong in ({"restartPolicy": "Always"}, {"container": {"volumeMounts": [{"name": "no", "mountPath": "/x"}]}}):
    refused(422, batch.create_namespaced_job, SPACE, job("wrong", "pass", **wrong))
wrong = {"container": {"resources": {"limits": {"memory": "8 GB"}}}}
said = refused(400, batch.create_namespaced_job, SPACE, job("wrong", "pass", **wrong))
assert "cannot be handled as a Job: quantities must match the regular expression" in said, said
refused(422, batch.create_namespaced_job, SPACE, job("Wrong", "pass"))
refused(404, core.read_namespaced_pod, "nobody", SPACE)
review = {"spec": {"resourceAttributes": {"namespace": SPACE, "verb": "create", "group": "batch", "resource": "jobs"}}}
assert auth.create_self_subject_access_review(review).status.allowed is True
jobs = dynamic.DynamicClient(client.ApiClient()).resources.get(api_version="batch/v1", kind="Job")  # asks what there is
assert jobs.get(name="bad", namespace=SPACE).spec.completions == 2
assert core.list_node().items[0].metadata.name == "node-1"
bare = client.Configuration(host=core.api_client.configuration.host)
bare.ssl_ca_cert = core.api_client.configuration.ssl_ca_cert
assert "system:anonymous" in refused(403, client.CoreV1Api(client.ApiClient(bare)).list_namespaced_pod, SPACE)
bare.api_key["authorization"] = "Bearer wrong"
refused(401, client.CoreV1Api(client.ApiClient(bare)).list_namespaced_pod, SPACE)
print("all of it")
