"""The backend vertex against the simulator: both clients, exactly once, faults, late logs, Spot losses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.backends import gcs
from cloudtrain.backends.api import Plan
from cloudtrain.backends.vertex import jobs
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.errors import BackendError, CloudtrainError, NoCapacity, Unreachable
from cloudtrain.events import MARK, State
from cloudtrain.job.job import Job
from cloudtrain.simulators import replicas
from cloudtrain.simulators.http import Fault
from cloudtrain.simulators.vertex.jobs import normalize_job
from cloudtrain.simulators.vertex.lifecycle import Behavior
from cloudtrain.simulators.vertex.server import Simulator
from cloudtrain.source.bundle import Bundle
from tests.conftest import wait_for

CREATE, LIST = r"/customJobs$", r"/customJobs\?"
UPLOAD = r"^/upload/"


class Bench:
    """A simulator and what is needed to submit to it."""

    def __init__(self, folder: Path, behavior: Behavior | None = None) -> None:
        self.folder = folder
        self.simulator = Simulator(folder / "simulator", behavior=behavior)
        self._count = 0

    def backend(self, **options) -> VertexBackend:
        place = {"project": "local", "bucket": "local", "endpoint": self.simulator.url, "image": "any:1"}
        return VertexBackend({**place, "client": "rest", "settle_s": 1.0, **options}, self.folder / "runs")

    def plan(self, script: str, run_id: str = "", attempt: int = 1, **changes) -> tuple[Plan, Bundle]:
        self._count += 1
        source = self.folder / f"source-{self._count}"
        source.mkdir()
        (source / "script.py").write_text(script)
        data = {"name": "vertex", "source": str(source), "entrypoint": "script.py"}
        job = Job.from_dict({**data, "environment": {"requirements": "none"}, **changes})
        bundle = Bundle.make(source, self.folder / "bundles")
        return self.backend().plan(job, bundle, run_id or f"vertex-run-{self._count}", attempt), bundle

    def asked(self, method: str, path: str) -> int:
        return self.simulator.server.count_requests(method, path)

    def sent(self) -> list[dict]:
        """The jobs that were created, as they were sent."""
        return [
            json.loads(body)
            for method, path, body in self.simulator.server.request_bodies
            if method == "POST" and "/customJobs" in path
        ]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.simulator.close()
    assert [place for _, place in replicas.list_processes() if place.startswith(str(tmp_path))] == []


@pytest.fixture
def paper(tmp_path: Path) -> Iterator[Bench]:
    """A service that takes jobs and never runs them."""
    made = Bench(tmp_path, Behavior(execute=False))
    yield made
    made.simulator.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.001)


def ended(backend: VertexBackend, handle: str):
    def final():
        status = backend.status(handle)
        return status if status.state.final else None

    return wait_for(final, "the end", 200)


def log_texts(backend: VertexBackend, handle: str, **more) -> list[str]:
    return [line.text for line in backend.logs(handle, **more) if line.rank >= 0 and not line.text.startswith(MARK)]


# -- the plan is what is sent -----------------------------------------------------------------------------------------

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


# -- exactly once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["rest", "sdk"])
@pytest.mark.parametrize("status", [503, 500, 0])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_an_answer_that_got_lost_makes_no_second_job(paper: Bench, client: str, status: int, after: bool):
    plan, bundle = paper.plan("print(1)")
    backend = paper.backend(client=client)
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", status, after=after))
    handle = backend.submit(plan, bundle)
    assert backend.find(plan.attempt_id) == handle == paper.backend().submit(plan, bundle)
    assert len(paper.simulator.jobs._jobs) == 1


def test_a_list_that_fails_is_not_an_absence(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("GET", LIST, 503, times=99))
    with pytest.raises(BackendError, match="jobs cannot be listed"):
        paper.backend().submit(plan, bundle)
    assert paper.sent() == [] and paper.asked("GET", LIST) == 5


def test_lost_answer_and_lost_list_send_nothing_twice(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults += [Fault("POST", CREATE, 503, after=True), Fault("GET", LIST, 503, times=99, skip=1)]
    with pytest.raises(BackendError):
        paper.backend().submit(plan, bundle)
    paper.simulator.faults.clear()
    assert paper.backend().submit(plan, bundle) == paper.backend().find(plan.attempt_id)
    assert len(paper.sent()) == 1


@pytest.mark.parametrize("client", ["rest", "sdk"])
@pytest.mark.parametrize("status", [403, 503])
def test_what_cannot_be_found_out_is_not_refused(paper: Bench, client: str, status: int):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", 503, after=True))
    paper.simulator.faults.append(Fault("GET", LIST, status, times=99, skip=1))
    with pytest.raises(Unreachable, match="could not be asked"):
        paper.backend(client=client).submit(plan, bundle)
    assert len(paper.sent()) == 1


@pytest.mark.parametrize("client", ["rest", "sdk"])
def test_a_refusal_after_a_lost_answer_is_none_where_the_job_was_made(paper: Bench, client: str, monkeypatch):
    """A list may lag behind: the job is in none of the first three."""
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", 503, after=True))
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", 403, "denied", times=99))
    look, looks = jobs.CustomJobs.find, []

    def late(its, attempt_id):
        looks.append(attempt_id)
        return None if len(looks) <= 4 else look(its, attempt_id)

    monkeypatch.setattr(jobs.CustomJobs, "find", late)
    assert paper.backend(client=client).submit(plan, bundle) and len(paper.simulator.jobs._jobs) == 1


def test_labels_are_read_back(paper: Bench):
    plan, bundle = paper.plan("print(1)", labels={"team": "nlp"})
    backend = paper.backend()
    assert backend.labels(backend.submit(plan, bundle)) == {"team": "nlp"}


def test_unchanged_source_uploads_nothing(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    backend = paper.backend()
    backend.submit(plan, bundle)
    assert paper.asked("POST", UPLOAD) == 1
    again = backend.plan(Job.from_dict(plan.job), bundle, "another-run")
    backend.submit(again, bundle)
    assert paper.asked("POST", UPLOAD) == 1 and len(paper.sent()) == 2


def test_an_upload_that_somebody_else_finishes_first_is_fine(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    place = plan.request["source"]
    paper.simulator.faults.append(Fault("GET", r"/o/", 404, "No such object"))  # looked before the other had written
    paper.simulator.storage.put(place["bucket"], place["object"], b"theirs")
    assert paper.backend().submit(plan, bundle)
    assert paper.simulator.storage.read(place["bucket"], place["object"]) == b"theirs"


@pytest.mark.parametrize("status", [503, 0])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_a_large_upload_goes_on_where_it_broke_off(paper: Bench, tmp_path: Path, monkeypatch, status, after):
    monkeypatch.setattr(gcs, "ONE_REQUEST", 1000)
    monkeypatch.setattr(gcs, "CHUNK", 256 << 10)
    data = bytes(range(256)) * 5000
    (tmp_path / "large").write_bytes(data)
    paper.simulator.faults.append(Fault("PUT", UPLOAD, status, skip=2, after=after))
    there = gcs.Bucket(paper.backend()._api, "local")
    assert there.upload_once(tmp_path / "large", "src/large") is True
    assert paper.simulator.storage.read("local", "src/large") == data
    assert there.upload_once(tmp_path / "large", "src/large") is False
    assert paper.simulator.server.received_bytes < len(data) + (600 << 10), "it began anew"


# -- what is refused, in words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["rest", "sdk"])
@pytest.mark.parametrize(
    ("status", "text", "said", "hint"),
    [
        (
            429,
            "The following quota metrics exceed quota limits: aiplatform.googleapis.com/"
            "custom_model_training_preemptible_nvidia_a100_gpus",
            "custom_model_training_preemptible_nvidia_a100_gpus",
            "Spot has quotas of its own",
        ),
        (
            400,
            "Resources are insufficient in region: us-central1. Please try a different region.",
            "no such machines",
            "another region",
        ),
        (
            403,
            "You do not have permission to act as service_account: train@p.iam",
            "service account",
            "serviceAccountUser",
        ),
        (
            403,
            "Vertex AI API has not been used in project p before or it is disabled.",
            "switched off",
            "gcloud services enable",
        ),
        (400, "Unsupported location us-moon1 for Vertex AI", "not offered there", "options.vertex.region"),
        (403, "Permission 'aiplatform.customJobs.create' denied", "permission denied", "docs/vertex.md"),
        (400, "Machine type is not supported", "Machine type is not supported", ""),
    ],
)
def test_refusals_are_sentences_that_say_what_to_do(paper: Bench, client, status, text, said, hint):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", status, text, times=9))
    with pytest.raises(CloudtrainError) as caught:
        paper.backend(client=client).submit(plan, bundle)
    assert said in caught.value.message and hint in caught.value.hint
    assert "\n" not in caught.value.message
    assert isinstance(caught.value, NoCapacity) is ("quota" in text or said == "no such machines")
    assert not isinstance(caught.value, Unreachable)
    assert len(paper.sent()) == 1, "what is refused is not sent again"


RATE = "Quota exceeded for quota metric 'Create requests' and limit 'Create requests per minute per region'"


@pytest.mark.parametrize("client", ["rest", "sdk"])
@pytest.mark.parametrize(("status", "text"), [(429, RATE), (429, "slow down"), (500, "x"), (503, "x"), (0, "")])
@pytest.mark.parametrize("path", [r"/customJobs(\?|$)", UPLOAD])
def test_an_outage_is_no_refusal(paper: Bench, client, status, text, path):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("POST", path, status, text, times=99))
    with pytest.raises(Unreachable) as caught:
        paper.backend(client=client).submit(plan, bundle)
    assert not isinstance(caught.value, NoCapacity)


def test_a_bucket_that_is_not_there(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    backend = paper.backend(bucket="nowhere")
    with pytest.raises(BackendError, match="bucket nowhere does not exist"):
        backend.submit(backend.plan(Job.from_dict(plan.job), bundle, "run"), bundle)
    assert [problem for problem in backend.check() if "bucket" in problem.message]
    assert paper.sent() == [] and paper.backend().check() == []


def test_a_service_that_does_not_answer(tmp_path: Path):
    place = {"project": "p", "bucket": "b", "endpoint": "http://127.0.0.1:9", "client": "rest"}
    backend = VertexBackend(place, tmp_path)
    with pytest.raises(Unreachable, match="was not reached"):
        backend.find("run-a1")
    assert backend.check()


# -- states -----------------------------------------------------------------------------------------------------------


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
    backend = bench.backend(strategy="FLEX_START", max_wait="1s")
    plan, bundle = bench.plan("print('never')")
    handle = backend.submit(backend.plan(Job.from_dict(plan.job), bundle, "run"), bundle)
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


# -- the log ----------------------------------------------------------------------------------------------------------


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


# -- restarts by the platform -----------------------------------------------------------------------------------------

COUNTING = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
mark = folder / f"step-of-{os.environ['NODE_RANK']}"  # the folder is the run's, and nodes are not in step
step = int(mark.read_text()) if mark.exists() else 0
leave = []
signal.signal(signal.SIGTERM, lambda *_: leave.append(1))
print("from", step, flush=True)
while step < 40:
    step += 1
    print("step", step, flush=True)
    time.sleep(0.1)
    if leave:
        mark.write_text(str(step))
        sys.exit(75)
print("whole", flush=True)
"""


@pytest.mark.parametrize("task", ["workerpool0-0", "workerpool1-0"])
def test_a_spot_loss_is_a_restart_from_the_checkpoint(bench: Bench, task: str):
    plan, bundle = bench.plan(COUNTING, num_nodes=2, resources={"use_spot": True})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    wait_for(lambda: log_texts(backend, handle).count("step 5") == 2, "five steps on both nodes")
    bench.simulator.jobs.preempt(handle.rpartition("/")[2], task)
    assert ended(backend, handle).state is State.SUCCEEDED
    lines = list(backend.logs(handle))
    for node in (0, 1):
        own = [line for line in lines if line.node == node]
        assert [line.seq for line in own] == sorted({line.seq for line in own})
        texts = [line.text for line in own if line.rank == node]
        assert texts[0] == "from 0" and texts[-1] == "whole"
        starts = [text for text in texts if text.startswith("from")]
        assert len(starts) == 2 and int(starts[1].split()[1]) >= 5
        steps = [int(text.split()[1]) for text in texts if text.startswith("step")]
        assert steps == list(range(1, 41)), "no step twice, none left out"
    results = [json.loads(line.text[len(MARK) :]) for line in lines if '"kind":"result"' in line.text]
    assert [result["code"] for result in results if result["state"] == "PREEMPTED"] == [75, 75]


def test_a_start_that_was_replaced_brings_nothing_home(bench: Bench):
    """Machines that were thought lost go on behind a network that has healed: a later start has claimed the run."""
    storage = bench.simulator.storage
    script = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
signal.signal(signal.SIGTERM, lambda *_: ((folder / "late").write_text("of the replaced one"), sys.exit(75)))
print("up", flush=True)
time.sleep(600)
"""
    plan, bundle = bench.plan(script, "replaced", resources={"use_spot": True}, retry={"max_attempts": 1})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    wait_for(lambda: "up" in log_texts(backend, handle), "its first line")
    base = "cloudtrain/replaced"
    assert storage.names("local", f"{base}/epochs/") == [f"{base}/epochs/00000001.json"]
    storage.put("local", f"{base}/epochs/00000002.json", b'{"epoch": 2, "attempt": 1, "token": "of another"}')
    bench.simulator.jobs.preempt(handle.rpartition("/")[2])
    status = ended(backend, handle)
    assert status.state is State.PREEMPTED and "start 2 of this run has claimed" in status.reason
    assert f"{base}/checkpoints/late" not in storage.names("local", base)


def test_without_restarts_a_spot_loss_is_preempted(bench: Bench):
    plan, bundle = bench.plan(COUNTING, resources={"use_spot": True}, retry={"max_attempts": 1})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    wait_for(lambda: "step 2" in log_texts(backend, handle), "two steps")
    bench.simulator.jobs.preempt(handle.rpartition("/")[2])
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.PREEMPTED, 75)


def test_a_crash_that_may_be_transient_is_tried_again(bench: Bench):
    script = (
        "import os, pathlib\n"
        "mark = pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'], 'tried')\n"
        "if mark.exists(): print('second'); raise SystemExit\n"
        "mark.touch()\n"
        "print('first', flush=True)\n"
        "os.abort()\n"
    )
    plan, bundle = bench.plan(script, retry={"max_attempts": 2})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED
    assert log_texts(backend, handle) == ["first", "second"]


def test_machines_that_vanish_without_notice(bench: Bench):
    plan, bundle = bench.plan(COUNTING, num_nodes=2, resources={"use_spot": True})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    wait_for(lambda: log_texts(backend, handle).count("step 3") == 2, "three steps on both nodes")
    bench.simulator.jobs.preempt(handle.rpartition("/")[2], "workerpool1-0", notice=False)
    assert ended(backend, handle).state is State.SUCCEEDED
    assert log_texts(backend, handle, follow=True).count("whole") == 2


def test_the_first_node_waits_until_the_others_have_brought_their_results(bench: Bench, tmp_path: Path):
    script = (
        "import os, pathlib\n"
        "if os.environ['RANK'] == '1':\n"
        "    for n in range(40): pathlib.Path(os.environ['CLOUDTRAIN_OUTPUT_DIR'], f'{n}.bin').write_bytes(os.urandom(1 << 18))\n"
    )
    plan, bundle = bench.plan(script, num_nodes=2)
    bench.simulator.faults.append(Fault("POST", r"^/upload/.*outputs", 200, times=40, delay_s=0.1))
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED
    into = backend.fetch(handle, tmp_path / "out")
    assert len(list((into / "outputs").iterdir())) == 40


def test_workers_that_come_late_are_waited_for(bench: Bench):
    bench.simulator.behavior.worker_late_s = 3.0
    plan, bundle = bench.plan("print('up')", num_nodes=2)
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED
    assert log_texts(backend, handle) == ["up", "up"]


def test_a_source_that_is_not_what_its_name_says(bench: Bench):
    plan, bundle = bench.plan("print('never')")
    backend = bench.backend()
    bench.simulator.storage.put("local", plan.request["source"]["object"], b"something else")
    handle = backend.submit(plan, bundle)
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 78)
    assert any("cannot be fetched" in line.text for line in backend.logs(handle))
