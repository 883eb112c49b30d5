"""Google's own SDK, by hand, against an address: imports nothing of ours. `python googles.py URL`."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request

URL = sys.argv[1]
os.environ["STORAGE_EMULATOR_HOST"] = URL

from google.api_core import exceptions  # noqa: E402
from google.auth.credentials import AnonymousCredentials  # noqa: E402
from google.cloud import aiplatform, storage  # noqa: E402

TRAIN = """
import json, os, sys, urllib.request
spec = json.loads(os.environ["CLUSTER_SPEC"])
pools, task = spec["cluster"], spec["task"]
hosts = [host for name in sorted(pools) for host in pools[name]]
rank = task["index"] if task["type"] == "workerpool0" else 1 + task["index"]
assert rank == int(os.environ["RANK"]) and len(hosts) == int(os.environ["WORLD_SIZE"]) and "LOCAL_RANK" not in os.environ
assert os.environ["AIP_MODEL_DIR"] == "gs://local/out/model/", os.environ["AIP_MODEL_DIR"]
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://%s:%s" % (hosts[0].split(":")[0], os.environ["MASTER_PORT"]),
                        rank=rank, world_size=len(hosts))
value = torch.tensor([10.0 ** rank])
dist.all_reduce(value)
print("reduced", rank, value.item(), *sys.argv[1:], flush=True)
dist.destroy_process_group()
sys.exit(int(os.environ.get("LEAVE_WITH", "0")))
"""


def job(name: str, command: list[str], replicas: int = 1, **env: str) -> aiplatform.CustomJob:
    pool = {
        "machine_spec": {"machine_type": "n1-standard-4"},
        "replica_count": 1,
        "container_spec": {
            "image_uri": "any:1",
            "command": ["python3", "-c", *command],
            "env": [{"name": key, "value": value} for key, value in env.items()],
        },
    }
    pools = [pool, {**pool, "replica_count": replicas - 1}] if replicas > 1 else [pool]
    return aiplatform.CustomJob(
        display_name=name, worker_pool_specs=pools, labels={"name": name}, base_output_dir="gs://local/out"
    )


def ended(made: aiplatform.CustomJob, bound_s: float = 240) -> str:
    until = time.monotonic() + bound_s
    while time.monotonic() < until:
        if made.state.name in {"JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED"}:
            return made.state.name
        time.sleep(0.1)
    raise AssertionError(f"{made.display_name} is still {made.state.name}")


def log(made: aiplatform.CustomJob) -> list[str]:
    text = f'resource.type="ml_job" AND resource.labels.job_id="{made.name}"'
    asked = json.dumps({"resourceNames": ["projects/local"], "filter": text, "pageSize": 1000}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/v2/entries:list", asked, method="POST")) as answer:
        return [entry["jsonPayload"]["message"] for entry in json.load(answer).get("entries", [])]


aiplatform.init(
    project="local",
    location="us-central1",
    staging_bucket="gs://local",
    credentials=AnonymousCredentials(),
    api_endpoint=URL,
    api_transport="rest",
)

good = job("good", [TRAIN, "a b", "$HOME"], replicas=2, OMP_NUM_THREADS="1")
good.submit()
assert ended(good) == "JOB_STATE_SUCCEEDED", (good.error, log(good))
assert {line for line in log(good) if line.startswith("reduced")} == {
    "reduced 0 11.0 a b $HOME",
    "reduced 1 11.0 a b $HOME",
}, log(good)

bad = job("bad", ["import sys; print('going'); sys.exit(3)"])
bad.submit()
assert ended(bad) == "JOB_STATE_FAILED" and "non-zero status of 3" in bad.error.message, bad.error
assert log(bad) == ["going"]

transient = job("transient", ["import os; print('again', flush=True); os.abort()"])
transient.submit()
assert ended(transient) == "JOB_STATE_FAILED" and log(transient).count("again") == 4, log(transient)

endless = job("endless", ["import time; print('up', flush=True); time.sleep(600)"])
endless.submit()
endless.cancel()
assert ended(endless) == "JOB_STATE_CANCELLED"

names = sorted(found.display_name for found in aiplatform.CustomJob.list())
assert names == ["bad", "endless", "good", "transient"], names
assert [found.name for found in aiplatform.CustomJob.list(filter='labels.name="good"')] == [good.name]
for text, number in (("labels.name:*", 4), ("labels.other:*", 0), ('state="JOB_STATE_CANCELLED" AND labels.name:*', 1),
                     ('state!="JOB_STATE_CANCELLED" AND state!="JOB_STATE_FAILED"', 1),
                     (f'create_time>="{good.create_time.isoformat().replace("+00:00", "Z")}"', 4)):  # fmt: skip
    assert len(aiplatform.CustomJob.list(filter=text)) == number, text
masked = aiplatform.CustomJob._empty_constructor().api_client.select_version("v1").list_custom_jobs(
    {"parent": "projects/local/locations/us-central1", "page_size": 3, "read_mask": "name,createTime"}
)  # fmt: skip
masked = list(masked)  # two pages
assert len(masked) == 4 and all(it.name and it.create_time and not it.display_name for it in masked), masked
assert aiplatform.CustomJob.get(good.resource_name).display_name == "good"
for broken in ({"labels": {"Name": "x"}}, {"worker_pool_specs": []}):
    try:
        aiplatform.CustomJob(
            **{"display_name": "x", "worker_pool_specs": good.job_spec.worker_pool_specs, **broken}
        ).submit()
    except exceptions.BadRequest:
        continue
    raise AssertionError(f"{broken} was accepted")
bad.delete()
assert len(aiplatform.CustomJob.list()) == 3

client = storage.Client(project="local", credentials=AnonymousCredentials(), client_options={"api_endpoint": URL})
bucket = client.bucket("local")
blob = bucket.blob("a/ü 1#?.bin")
blob.upload_from_string(b"\r\n--one--\r\n" * 1000, if_generation_match=0)
try:
    bucket.blob("a/ü 1#?.bin").upload_from_string(b"two", if_generation_match=0)
    raise AssertionError("it was overwritten")
except exceptions.PreconditionFailed:
    pass
blob.reload()
first = blob.generation
bucket.blob("a/ü 1#?.bin").upload_from_string(b"two", if_generation_match=first)
assert bucket.blob("a/ü 1#?.bin").download_as_bytes() == b"two"
large = os.urandom(3 << 20)
slow = bucket.blob("a/large")
slow.chunk_size = 1 << 20  # a resumable upload in pieces
slow.upload_from_string(large)
assert bucket.blob("a/large").download_as_bytes(start=100, end=1 << 20) == large[100 : (1 << 20) + 1]
for n in range(25):
    bucket.blob(f"many/{n:02}").upload_from_string(b"x")
pages = list(client.list_blobs("local", prefix="many/", page_size=10).pages)
assert [blob.name for page in pages for blob in page] == [f"many/{n:02}" for n in range(25)] and len(pages) == 3
listed = client.list_blobs("local", delimiter="/")
assert [blob.name for blob in listed] == [] and listed.prefixes == {"a/", "many/"}
bucket.blob("a/large").delete()
assert not bucket.blob("a/large").exists()
print("all of it")
