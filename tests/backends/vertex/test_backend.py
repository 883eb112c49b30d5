"""The Vertex AI backend over its simulator: what is sent, states, and the log."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.backends.vertex import jobs
from cloudtrain.events import MARK, State
from cloudtrain.job.job import Job
from cloudtrain.simulators.http import Fault
from cloudtrain.simulators.vertex.jobs import normalize_job
from tests.backends.vertex.bench import CREATE, Bench, ended, log_texts

pytestmark = pytest.mark.usefixtures("quick")
RICH = {
    "num_nodes": 3,
    "resources": {"accelerators": "L4:1", "disk_gb": 200, "use_spot": True},
    "labels": {"team": "nlp"},
    "env": {"A": "b c"},
    "args": ["--x", "line\nbreak", "$HOME", ""],
}
OPTIONS = {
    "service_account": "train@p.iam.gserviceaccount.com",
    "network_attachment": "mine",
    "kms_key": "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k",
    "tensorboard": "projects/p/locations/us-central1/tensorboards/1",
    "web_access": True,
    "raw": {"jobSpec": {"enableDashboardAccess": True, "protectedArtifactLocationId": "us"}},
}


@pytest.mark.parametrize("client", ["rest", "sdk"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "rich"])
def test_a_server_receives_what_the_plan_printed(paper: Bench, client: str, options: dict, capfd):
    from google.cloud import aiplatform_v1

    backend = paper.backend(client=client, **options)
    plan, bundle = paper.plan("print(1)", **RICH)
    plan = backend.plan(Job.from_dict(plan.job), bundle, "run-x")
    handle = backend.submit(plan, bundle)
    assert capfd.readouterr() == ("", ""), "a backend never prints"
    assert paper.asked("POST", CREATE if client == "rest" else r"/customJobs\?") == 1
    wanted = aiplatform_v1.CustomJob.from_json(json.dumps(Plan.from_json(plan.to_json()).request["customJob"]))
    (sent,) = paper.sent()
    assert aiplatform_v1.CustomJob.from_json(json.dumps(sent)) == wanted
    assert normalize_job(sent)["labels"]["cloudtrain_attempt"] == "run-x-a1"
    assert backend.find("run-x-a1") == handle and backend.find("run-x-a2") is None


def test_nothing_but_the_sdks_create_imports_the_sdk(bench: Bench):
    """Status, log, cancel, list and fetch, and the rest client's submit, in a process of their own."""
    plan, bundle = bench.plan("print('light')")
    (bench.folder / "plan.json").write_text(plan.to_json())
    script = f"""
import sys
from pathlib import Path
from cloudtrain.backends.api import Plan
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.source.bundle import Bundle
options = {{"project": "local", "bucket": "local", "endpoint": {bench.simulator.url!r}, "client": "rest", "settle_s": 1}}
backend = VertexBackend(options, Path("runs"))
plan = Plan.from_json(Path({str(bench.folder / "plan.json")!r}).read_text())
handle = backend.submit(plan, Bundle.stored(Path({str(bundle.path.parent)!r}), plan.bundle["sha256"]))
lines = list(backend.logs(handle, follow=True))
assert any(line.text == "light" for line in lines)
while not backend.status(handle).state.final: pass
backend.find(plan.attempt_id); backend.cancel(handle); backend.fetch(handle, Path({str(bench.folder / "out")!r}))
heavy = ("google.cloud.aiplatform", "google.auth", "google.api_core", "grpc", "requests", "pydantic", "torch")
assert sys.modules.keys().isdisjoint(heavy), sys.modules.keys() & set(heavy)
print("light enough")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "light enough", done.stderr


def test_without_the_sdk_the_light_client_sends(paper: Bench, monkeypatch):
    monkeypatch.setattr(jobs, "has_sdk", lambda: False)
    monkeypatch.setattr(jobs.CustomJobs, "_create_by_sdk", None)
    plan, bundle = paper.plan("print(1)")
    assert paper.backend(client="sdk").submit(plan, bundle)
    assert len(paper.sent()) == 1


@pytest.mark.parametrize("api_state", sorted(jobs.STATES))
def test_every_state_of_the_api_is_known_and_every_final_one_is_final(paper: Bench, api_state: str):
    from google.cloud.aiplatform_v1.types import JobState

    assert {state.name for state in JobState} == set(jobs.STATES)
    plan, bundle = paper.plan("print(1)")
    backend = paper.backend()
    handle = backend.submit(plan, bundle)
    ended_at = {"endTime": "2026-01-01T00:00:00Z", "startTime": "2026-01-01T00:00:00Z"}
    paper.simulator.jobs.change(handle.rpartition("/")[2], state=api_state, **ended_at)
    final = api_state.removeprefix("JOB_STATE_") in (
        "SUCCEEDED",
        "FAILED",
        "CANCELLED",
        "EXPIRED",
        "PARTIALLY_SUCCEEDED",
        "PAUSED",
    )
    assert backend.status(handle).state.final is final
    assert (backend.status(handle).state is State.SUCCEEDED) is (api_state == "JOB_STATE_SUCCEEDED")
    if final:
        assert list(backend.logs(handle, follow=True)) == []  # and so following ends


def test_cancelled_while_it_waits_for_machines(bench: Bench):
    bench.simulator.behavior.queue_s = 600
    plan, bundle = bench.plan("print('never')")
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    assert backend.status(handle).state is State.QUEUED
    backend.cancel(handle)
    assert ended(backend, handle).state is State.CANCELLED
    assert log_texts(backend, handle, follow=True) == []


def test_a_job_that_expires_in_the_queue_ends(bench: Bench):
    bench.simulator.behavior.queue_s = 600
    backend = bench.backend(strategy="FLEX_START")
    plan, bundle = bench.plan("print('never')")
    limits = {**plan.job["limits"], "max_wait": "1s"}
    handle = backend.submit(backend.plan(Job.from_dict({**plan.job, "limits": limits}), bundle, "run"), bundle)
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.TIMED_OUT, None) and "insufficient" in status.reason


def test_looking_survives_errors_of_the_service(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    backend = paper.backend()
    handle = backend.submit(plan, bundle)
    for status in (503, 500, 429, 0):
        paper.simulator.faults.append(Fault("GET", r"/customJobs/\d+", status))
    assert backend.status(handle).state is State.STARTING
    assert paper.simulator.faults[-1].times == 0


def test_late_and_doubled_entries_come_once_and_in_order(bench: Bench):
    entries = bench.simulator.entries
    entries.late_every, entries.late_s, entries.twice_every = 7, 1.2, 5
    backend = bench.backend(settle_s=5)
    script = "import time\nfor n in range(400):\n    print('line', n, flush=True)\n    time.sleep(0.005)\n"
    plan, bundle = bench.plan(script, num_nodes=2)
    handle = backend.submit(plan, bundle)
    bench.simulator.faults += [Fault("POST", "entries:list", 429, times=2, skip=2)]
    lines = list(backend.logs(handle, follow=True))
    for node in (0, 1):
        own = [line for line in lines if line.node == node]
        assert [line.seq for line in own] == list(range(len(own)))
        texts = [line.text for line in own if line.rank >= 0 and not line.text.startswith(MARK)]
        assert texts == [f"line {n}" for n in range(400)]
    for cut in (0, 17, 333, len(lines) - 1):
        rest = list(backend.logs(handle, after=lines[cut].cursor))
        for node in (0, 1):
            assert [x.seq for x in rest if x.node == node] == [x.seq for x in lines[cut + 1 :] if x.node == node]


def test_a_log_that_may_not_be_read(bench: Bench):
    plan, bundle = bench.plan("import sys; sys.exit(3)")
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    bench.simulator.faults.append(
        Fault("POST", "entries:list", 403, "Permission 'logging.logEntries.list' denied", times=10**6)
    )
    (line,) = backend.logs(handle, follow=True)
    assert "roles/logging.viewer" in line.text and "https://console.cloud.google.com/" in line.text
    assert list(backend.logs(handle, after=line.cursor)) == []
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 3), "told by the platform's own words"


def test_the_platforms_own_lines_are_shown(bench: Bench):
    bench.simulator.behavior.service_lines = True
    plan, bundle = bench.plan("print('mine')")
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    ended(backend, handle)
    texts = [line.text for line in backend.logs(handle)]
    assert "Job is running." in texts and "mine" in texts and len(texts) == len(set(texts))
