"""Jobs of a workspace without running them: sent once, found, read, cancelled; errors and what they mean."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import pytest

from cloudtrain.backends.azure import Tokens
from cloudtrain.backends.azureml import client, doctor, jobs
from cloudtrain.backends.azureml.backend import AzuremlBackend
from cloudtrain.backends.azureml.client import Workspace
from cloudtrain.backends.azureml.options import AzuremlOptions
from cloudtrain.backends.http import Answer, Http
from cloudtrain.backends.plan import Plan
from cloudtrain.cli import main
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, NoCapacity, NotReached, Unreachable
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.azureml.jobs import Behavior
from cloudtrain.simulators.azureml.server import ID, AzureApiError, Simulator
from cloudtrain.simulators.http import Fault
from cloudtrain.source.bundle import Bundle
from cloudtrain.testing.clock import VirtualClock


class Paper:
    """A workspace that takes jobs and never runs them."""

    def __init__(self, folder: Path) -> None:
        self.simulator, self.folder = Simulator(folder / "simulator", behavior=Behavior(execute=False, page=2)), folder
        source = folder / "source"
        source.mkdir()
        (source / "script.py").write_text("print(1)")
        self.bundle = Bundle.make(source, folder / "bundles")

    def backend(self, **options: Any) -> AzuremlBackend:
        return AzuremlBackend({**self.simulator.options, **options}, self.folder / "runs")

    def plan(self, run_id: str = "run", **changes: Any) -> Plan:
        data = {"name": "a", "source": str(self.folder / "source"), "entrypoint": "script.py", "image": "any:1"}
        job = Job.from_dict({**data, "environment": {"requirements": "none"}, **changes})
        return self.backend().plan(job, self.bundle, run_id)

    def sent(self) -> list[dict[str, Any]]:
        bodies = self.simulator.server.request_bodies
        return [
            json.loads(body) for method, path, body in bodies if method == "PUT" and "/jobs/" in path and ID in path
        ]


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paper]:
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.0)
    made = Paper(tmp_path)
    for name, value in made.simulator.environ.items():
        monkeypatch.setenv(name, value)
    yield made
    made.simulator.close()


def test_the_workspace_receives_what_the_plan_printed(paper: Paper, capfd):
    plan, backend = paper.plan(labels={"team": "nlp"}), paper.backend()
    AzuremlOptions(**paper.simulator.options)
    handle = backend.submit(plan, paper.bundle)
    assert capfd.readouterr() == ("", "")
    assert paper.sent() == [json.loads(json.dumps(Plan.from_json(plan.to_json()).request["job"]))]
    assert backend.submit(plan, paper.bundle) == handle == backend.find("run-a1") and len(paper.sent()) == 1
    assert backend.find("run-a2") is None and backend.labels(handle) == {"team": "nlp"}
    assert list(paper.simulator.blobs.objects("jobs")) == [f"bundles/{paper.bundle.sha256}.tar.gz"]
    assert backend.status(handle).state is State.QUEUED and list(backend.logs(handle)) == []


@pytest.mark.parametrize("status", [0, 500, 503, 429])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("path", [r"/jobs/run-a1", r"/versions/", r"/bundles/"])
def test_lost_answers_make_no_second_job(paper: Paper, status: int, after: bool, path: str):
    plan, backend = paper.plan(), paper.backend()
    paper.simulator.server.faults.append(Fault("PUT", path, status, after=after))
    assert backend.submit(plan, paper.bundle) == "run-a1" == backend.find("run-a1")
    assert list(paper.simulator.jobs) == ["run-a1"] and paper.simulator.server.faults[0].times == 0


def test_without_an_answer_the_attempt_stays_open(paper: Paper):
    plan, backend = paper.plan(), paper.backend()
    paper.simulator.server.faults.append(Fault("PUT", "/jobs/run-a1", 0, times=99, after=True))
    with pytest.raises(Unreachable):
        backend.submit(plan, paper.bundle)
    assert paper.backend().find("run-a1") == "run-a1"
    paper.simulator.server.faults[:] = [Fault("GET", "/jobs/run-a1", 503, times=99)]
    with pytest.raises(Unreachable):
        backend.find("run-a1")
    paper.simulator.server.faults[:] = [Fault("PUT", "/versions/", 503, times=99)]
    paper.simulator.environments.clear()
    with pytest.raises(NotReached):
        backend.submit(plan, paper.bundle)


def test_no_workspace_is_not_no_attempt(paper: Paper):
    answer = {"error": {"code": "ResourceNotFound", "message": "The Resource 'workspaces/other' was not found"}}
    assert client.api_error(client.Answer(404, {}, json.dumps(answer).encode()), "x").code == "ResourceNotFound"
    backend = paper.backend(workspace="other")
    with pytest.raises(BackendError):
        backend.find("run-a1")


def test_every_status_of_the_service_is_known(paper: Paper):
    """JobStatus in azure-rest-api-specs, machinelearningservices stable/2024-10-01, and azure-ai-ml's Scheduled."""
    final = {"Completed", "Failed", "Canceled"}
    open_ones = {"NotStarted", "Starting", "Provisioning", "Preparing", "Queued", "Running", "Finalizing"}
    known = open_ones | {"CancelRequested", "NotResponding", "Paused", "Unknown"}
    assert known | final | {"Scheduled"} == set(jobs.STATES)
    backend = paper.backend()
    handle = backend.submit(paper.plan(), paper.bundle)
    for name, state in jobs.STATES.items():
        paper.simulator.jobs[handle].status = name
        assert state.final is (name in final)
        if not state.final:
            assert backend.status(handle).state is state
    assert paper.backend().status("absent-a1").state is State.LOST


@pytest.mark.parametrize(
    "service,lines,state,code",
    [
        ("Completed", [("SUCCEEDED", 0, "")], State.SUCCEEDED, 0),
        ("Failed", [("FAILED", 3, "rank 0 exited with 3")], State.FAILED, 3),
        ("Failed", [("TIMED_OUT", None, "limit")], State.TIMED_OUT, None),
        ("Canceled", [("PREEMPTED", None, "asked")], State.CANCELLED, None),
        ("Failed", [("PREEMPTED", None, "asked")], State.PREEMPTED, None),
        ("Canceled", [], State.CANCELLED, None),
        ("Completed", [], State.LOST, None),
        ("Failed", [], State.FAILED, None),
    ],
)
def test_an_end_is_what_the_launcher_wrote_last(
    paper: Paper, service: str, lines: list, state: State, code: int | None
):
    backend = paper.backend()
    handle = backend.submit(paper.plan(), paper.bundle)
    job = paper.simulator.jobs[handle]
    job.status, job.logs = service, [bytearray()]
    for seq, (name, exit_code, reason) in enumerate(lines):
        event = {"kind": "result", "state": name, "reason": reason, "code": exit_code}
        job.logs[0] += f"{seq} -1 2026-01-01T00:00:00.000Z ::cloudtrain::{json.dumps(event)}\n".encode()
    status = backend.status(handle)
    assert (status.state, status.exit_code) == (state, code)


def test_many_attempts_are_one_call_for_some_together(paper: Paper, monkeypatch: pytest.MonkeyPatch):
    backend = paper.backend()
    handles = [backend.submit(paper.plan(f"run-{number}"), paper.bundle) for number in range(5)]
    states = ("Queued", "Preparing", "Running", "CancelRequested", "Completed")
    for handle, state in zip(handles, states, strict=True):
        paper.simulator.jobs[handle].status, paper.simulator.jobs[handle].started = state, "2026-01-01T00:00:00Z"
    elsewhere = paper.backend(experiment="study")
    assert paper.backend(endpoint="http://other").group != backend.group != paper.backend(workspace="other").group
    assert elsewhere.group != backend.group == paper.backend().group
    asked = paper.simulator.server.requests
    assert elsewhere.statuses(handles) == {} == backend.statuses([])
    monkeypatch.setattr(jobs, "TOGETHER", 3)
    backend.statuses(handles)
    before = len(asked)
    found = backend.statuses([*handles, "absent-a1"])
    assert len(asked) == before + 2
    assert found == {handle: backend.status(handle) for handle in handles[:4]}, "an end needs the log"
    assert found[handles[2]].started_at and str(found[handles[0]].url).endswith(f"/runs/{handles[0]}?wsid={ID}")
    paper.simulator.jobs[handles[2]].started = None
    assert handles[2] not in backend.statuses(handles), "its start is in the log"
    paper.simulator.server.faults.append(Fault("POST", "/runs/runIds", 503, times=99))
    with pytest.raises(Unreachable):
        backend.statuses(handles)


def test_a_shell_is_a_command_of_azures_where_the_job_has_a_key(paper: Paper):
    key = {"ssh_public_key": "ssh-ed25519 AAAA me", "compute": "gpus"}
    backend = paper.backend(**key)
    plan = backend.plan(Job.from_dict({**paper.plan(num_nodes=2).job, "options": {}}), paper.bundle, "run")
    handle = backend.submit(plan, paper.bundle)
    opened = backend.shell(handle, 1, (), stdin=True, terminal=True)
    start, end = "az ml job connect-ssh --name run-a1 --node-index 1 --private-key-file-path PRIVATE_KEY_FILE", "local"
    assert opened.address.startswith(start) and opened.address.endswith(f"--workspace-name {end}") and opened.note
    with pytest.raises(BackendError, match="no node 2"):
        backend.shell(handle, 2, (), stdin=True, terminal=True)
    with pytest.raises(BackendError, match="no job"):
        backend.shell("absent-a1", 0, (), stdin=True, terminal=True)
    bare = paper.backend().submit(paper.plan("bare"), paper.bundle)
    closed = backend.shell(bare, 0, (), stdin=True, terminal=True)
    assert not closed.address and "ssh_public_key" in closed.note


def test_exec_and_forward_name_what_azure_offers(paper: Paper, home: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(paper.folder)
    monkeypatch.setattr("cloudtrain.runs.sending.handover.start", lambda *_, **__: None)  # no watcher is left behind
    job = {"name": "a", "source": str(paper.folder / "source"), "entrypoint": "script.py", "image": "any:1"}
    printed = {}
    for kind, more in {
        "cluster": {"ssh_public_key": "ssh-ed25519 AAAA me", "compute": "gpus"},
        "serverless": {},
    }.items():
        options = {"azureml": {**paper.simulator.options, **more}}
        run = Submitter("azureml", home=home, watch=False).submit({**job, "options": options})
        paper.simulator.jobs[f"{run.run_id}-a1"].status = "Running"
        for words in (["exec", run.run_id, "--", "true"], ["forward", run.run_id, "6006:0"]):
            printed[kind, words[0]] = main(words), "".join(capsys.readouterr())
    assert printed["cluster", "exec"][0] == 0 and "az ml job connect-ssh --name a-" in printed["cluster", "exec"][1]
    assert (
        printed["serverless", "exec"][0] == 2 and "options.azureml.ssh_public_key" in printed["serverless", "exec"][1]
    )
    for kind, word in (("cluster", "connect-ssh"), ("serverless", "options.azureml.ssh_public_key")):
        code, text = printed[kind, "forward"]
        assert code == 2 and "runs on azureml, where cloudtrain cannot forward ports" in text and word in text


@pytest.mark.parametrize(
    ("change", "words", "hint"),
    [
        (
            {"compute": "none"},
            "the cluster none cannot be read: Compute none does not exist",
            "options.azureml.compute",
        ),
        ({"workspace": "absent"}, "the workspace cannot be read: The Resource .*absent. was not found", "workspace"),
    ],
)
def test_a_place_that_is_not_there_is_said_before_anything_is_made(
    paper: Paper, home: Path, change: dict[str, str], words: str, hint: str
):
    submitter = Submitter("azureml", home=home, watch=False)
    job = {"name": "a", "source": str(paper.folder / "source"), "entrypoint": "script.py", "image": "any:1"}
    with pytest.raises(BackendError, match=words) as refused:
        submitter.submit({**job, "options": {"azureml": {**paper.simulator.options, **change}}})
    assert hint in refused.value.hint and submitter.store.runs() == []
    assert not paper.simulator.environments and not paper.simulator.blobs.objects("jobs")
    paper.simulator.server.faults.append(Fault("GET", "/workspaces/local.api", 503, times=99))
    run = submitter.submit({**job, "options": {"azureml": paper.simulator.options}})
    assert run.run_id, "what does not answer is no reason to refuse"


def test_an_evicted_machine_is_a_preemption(paper: Paper):
    backend = paper.backend()
    handle = backend.submit(paper.plan(), paper.bundle)
    paper.simulator.jobs[handle].status = "Failed"
    paper.simulator.jobs[handle].error = {"message": "The node was preempted"}
    assert backend.status(handle).state is State.PREEMPTED


def test_times_are_those_of_run_history_else_of_the_log(paper: Paper):
    line, result = b"0 -1 2026-01-01T00:00:00.000Z began\n", {"kind": "result", "state": "FAILED", "code": 3}
    for run_id, began, first in (("own", "2026-01-01T00:00:01.1234567+00:00", "01.123456"), ("log", None, "00.000")):
        backend = paper.backend()
        handle = backend.submit(paper.plan(run_id), paper.bundle)
        job = paper.simulator.jobs[handle]
        job.status, job.started, job.logs = "Running", began, [bytearray(line)]
        start = f"2026-01-01T00:00:{first}Z"
        assert backend.status(handle).started_at == start
        before = paper.simulator.server.count_requests("GET", "/details")
        assert backend.status(handle).started_at == start
        assert paper.simulator.server.count_requests("GET", "/details") == before, "it is read once"
        job.status, job.ended = "Failed", began and "2026-01-01T00:09:00Z"
        job.logs[0] += f"1 -1 2026-01-01T00:08:00.000Z ::cloudtrain::{json.dumps(result)}\n".encode()
        status = paper.backend().status(handle)
        end = "2026-01-01T00:09:00.000000Z" if began else "2026-01-01T00:08:00.000Z"
        assert (status.state, status.started_at, status.ended_at) == (State.FAILED, start, end)


def test_a_queued_job_is_cancelled_and_again(paper: Paper):
    backend = paper.backend()
    handle = backend.submit(paper.plan(), paper.bundle)
    for _ in range(2):
        backend.cancel(handle)
        assert backend.status(handle).state is State.CANCELLED
    assert paper.simulator.server.count_requests("POST", "/cancel") == 1
    backend.cancel("absent-a1")


def test_attempts_are_found_by_their_tag_on_all_pages(paper: Paper):
    backend = paper.backend()
    for number in range(5):
        backend.submit(paper.plan(f"run-{number}", labels={"team": "a" if number else "b"}), paper.bundle)
    found = list(backend.labelled("team", "a", {"run-3-a1"}))
    assert [each.attempt_id for each in found] == ["run-4-a1", "run-2-a1", "run-1-a1"]
    assert found[0].record["manifest"]["run_id"] == "run-4" and found[0].created_at


def test_a_job_without_a_time_was_found_without_one(paper: Paper):
    paper.simulator.jobs[paper.backend().submit(paper.plan(), paper.bundle)].created = ""
    assert [each.created_at for each in paper.backend().labelled("cloudtrain_run", "run", ())] == [None]


def test_facts_and_the_machine_are_those_of_the_request(paper: Paper):
    plan = paper.plan(num_nodes=2, resources={"accelerators": "A100-80GB:2"})
    known = paper.backend(region="eastus").facts(plan)
    machine = "Standard_NC48ads_A100_v4"
    assert (known.account, known.region) == (paper.simulator.options["subscription"], "eastus")
    assert (known.instance_types, known.images, known.gpus) == ((machine,), ("any:1",), 4)
    assert paper.backend(region="eastus").machine(plan) == f"azureml/eastus/{machine}"
    assert paper.backend().facts(plan).region == "" == paper.backend().machine(plan)


def test_the_platforms_limit_is_that_of_the_job_its_grace_and_the_setup(paper: Paper):
    for spot in (False, True):
        plan = paper.plan(limits={"max_runtime": "2h", "grace": "1m"}, resources={"use_spot": spot})
        limit = paper.backend().time_limit(plan)
        assert limit.seconds == 7200 + 60 + 900 and "900 s" in limit.parts and bool(limit.note) is spot
        assert plan.request["job"]["properties"]["limits"]["timeout"] == "PT2H16M"


def test_what_init_finds_is_what_the_azure_cli_has(monkeypatch: pytest.MonkeyPatch):
    told = {"config": [{"name": "group", "value": "g"}, {"name": "workspace", "value": "w"}], "account": "s"}

    def run(words: tuple[str, ...], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout=json.dumps(told[words[1]]).encode())

    monkeypatch.setattr(doctor.subprocess, "run", run)
    found = {"subscription": "s", "resource_group": "g", "workspace": "w"}
    assert AzuremlBackend.discover() == found
    assert AzuremlBackend.ci_values({**found, "store": "az://jobs@account"}) == found
    told.update(config=[], account=None)
    assert AzuremlBackend.discover() == {}


@pytest.mark.parametrize("status", [400, 403])
def test_a_refusal_says_what_was_not_made(paper: Paper, status: int):
    paper.simulator.server.faults.append(Fault("PUT", "/jobs/run-a1", status, "no such thing"))
    with pytest.raises(BackendError) as refused:
        paper.backend().submit(paper.plan(), paper.bundle)
    assert refused.value.message.startswith("the job was not created: no such thing")


def test_results_are_fetched_from_where_the_job_says(paper: Paper, tmp_path: Path):
    handle = paper.backend().submit(paper.plan(), paper.bundle)
    for name in ("model/w", "outputs/a/b"):
        paper.simulator.blobs.write("jobs", f"runs/run/{name}", name.encode())
    into = paper.backend().fetch(handle, tmp_path / "into" / "deep")
    assert (into / "model" / "w").read_bytes() == b"model/w" and (into / "outputs" / "a" / "b").exists()
    part = paper.backend().fetch(handle, tmp_path / "part", ("outputs/a",))
    assert [path.name for path in part.rglob("*") if path.is_file()] == ["b"]
    with pytest.raises(BackendError, match="where its results are"):
        paper.backend().fetch("absent-a1", tmp_path / "none")


def test_logs_of_nodes_by_their_cursor(paper: Paper):
    backend = paper.backend()
    handle = backend.submit(paper.plan(num_nodes=2, resources={"instance_type": "Standard_D4s_v3"}), paper.bundle)
    job = paper.simulator.jobs[handle]
    job.logs = [
        bytearray(b"0 0 2026-01-01T00:00:01Z a\n1 0 2026-01-01T00:00:03Z c\n"),
        bytearray(b"0 1 2026-01-01T00:00:02Z b\n1 1 20"),
    ]
    lines = list(backend.logs(handle))
    assert [(line.node, line.text) for line in lines] == [(0, "a"), (1, "b"), (0, "c")]
    job.logs[1] += b"26-01-01T00:00:04Z d\n"
    assert [line.text for line in backend.logs(handle, after=lines[0].cursor)] == ["b", "c", "d"]
    assert list(backend.logs(handle, after=lines[-1].cursor))[0].text == "d"


def real_address(paper: Paper, monkeypatch: pytest.MonkeyPatch, clock: Clock = SYSTEM) -> AzuremlBackend:
    """Return a backend of Azure's own address, where the simulator answers; discovery and logs are the simulator's."""

    def answer(_: object, request: Request) -> object:
        address = request.full_url.replace(client.MANAGEMENT, paper.simulator.url).replace(
            "https://loop", paper.simulator.url
        )
        again = Request(address, request.data, dict(request.header_items()), method=request.get_method())
        return build_opener(ProxyHandler({})).open(again, timeout=60)

    monkeypatch.setattr(HTTPSHandler, "https_open", answer)
    monkeypatch.setattr(Workspace, "_history", lambda _: "https://loop")
    return AzuremlBackend({**paper.simulator.options, "endpoint": ""}, paper.folder / "runs", clock)


def test_a_followed_log_of_azure_is_looked_at_every_five_seconds(paper: Paper, monkeypatch: pytest.MonkeyPatch):
    """Azure allows some hundred calls a minute for a subscription, and a look costs three."""
    monkeypatch.setattr(Tokens, "token", lambda self, scope: ("token", 3600.0))
    handle = paper.backend().submit(paper.plan(), paper.bundle)
    job = paper.simulator.jobs[handle]
    job.status, job.logs = "Running", [bytearray(b"0 0 2026-01-01T00:00:01Z a\n")]

    class Passing(VirtualClock):
        """Each pause brings the job nearer to its end."""

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            job.logs[0] += b"1 0 2026-01-01T00:00:02Z b\n" if len(self.slept) == 2 else b""
            job.status = "Running" if len(self.slept) < 4 else "Completed"

    clock = Passing()
    lines = real_address(paper, monkeypatch, clock).logs(handle, follow=True)
    assert [line.text for line in lines] == ["a", "b"] and clock.slept == [5.0] * 4


def test_each_token_is_asked_for_with_the_identity_that_the_file_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Credential:
        """Keeps the file's text, as azure-identity's WorkloadIdentityCredential does for 10 minutes."""

        read = ""

        def get_token(self, scope: str) -> SimpleNamespace:
            self.read = self.read or (tmp_path / "token").read_text()
            return SimpleNamespace(token=f"{self.read} for {scope}", expires_on=3600)

    monkeypatch.setitem(sys.modules, "azure", ModuleType("azure"))
    monkeypatch.setitem(sys.modules, "azure.identity", SimpleNamespace(DefaultAzureCredential=Credential))
    tokens = Tokens(VirtualClock())
    for text in ("first", "second"):
        (tmp_path / "token").write_text(text)
        assert tokens.token("logs")[0] == f"{text} for logs"


def test_an_expired_token_is_renewed_once(paper: Paper, monkeypatch: pytest.MonkeyPatch):
    scopes: list[str] = []
    monkeypatch.setattr(Tokens, "token", lambda self, scope: (scopes.append(scope) or f"token-{len(scopes)}", 3600.0))
    backend = real_address(paper, monkeypatch)
    paper.simulator.server.faults.append(Fault("GET", "/jobs/run-a1", 401))
    assert backend.find("run-a1") is None and scopes == ["https://management.azure.com/.default"] * 2
    paper.simulator.server.faults.append(Fault("GET", "/jobs/run-a1", 401, times=9))
    with pytest.raises(BackendError) as refused:
        backend.find("run-a1")
    assert refused.value.hint.startswith("az login")


def test_an_error_of_storage_has_its_code_in_xml():
    answer = client.Answer(403, {}, b"<?xml?><Error><Code>AuthenticationFailed</Code><Message>long</Message></Error>")
    assert client.api_error(answer, "a log cannot be read").code == "AuthenticationFailed"


@pytest.mark.parametrize(
    "status,code,text,kind,hint",
    [
        (
            400,
            "UserError",
            "Not enough quota available for Standard_ND96isr_H100_v5 in SubscriptionId",
            NoCapacity,
            "quota",
        ),
        (409, "AllocationFailed", "We do not have sufficient capacity", NoCapacity, "region"),
        (429, "TooManyRequests", "Too many requests: the quota of calls", Unreachable, "try again"),
        (
            403,
            "AuthorizationFailed",
            "does not have authorization to perform action",
            BackendError,
            "AzureML Data Scientist",
        ),
        (404, "ResourceGroupNotFound", "Resource group 'x' could not be found.", BackendError, "resource_group"),
        (404, "ResourceNotFound", "The Resource was not found", BackendError, "workspace"),
        (400, "UserError", "Compute gpus does not exist", BackendError, "options.azureml.compute"),
        (401, "InvalidAuthenticationToken", "The access token has expired", BackendError, "az login"),
        (500, "ServiceError", "", Unreachable, "try again"),
    ],
)
def test_errors_are_sentences_with_what_to_do(status: int, code: str, text: str, kind: type, hint: str):
    error = client.api_error(
        client.Answer(status, {}, json.dumps({"error": {"code": code, "message": text}}).encode()), "it failed"
    )
    assert isinstance(error, kind) and error.message.startswith("it failed: ") and hint in error.hint
    assert isinstance(error, NoCapacity | Unreachable) is (kind is not BackendError)


@pytest.mark.parametrize(
    "change,word",
    [
        ({"computeId": "/computes/none"}, "Compute"),
        ({"environmentId": f"{ID}/environments/cloudtrain/versions/none"}, "Environment"),
        ({"limits": {"timeout": "1h"}}, "timeout"),
        ({"unknown": 1}, "unknown"),
        ({"command": ""}, "command"),
    ],
)
def test_the_simulator_refuses_what_the_service_would(paper: Paper, change: dict, word: str):
    paper.backend().submit(paper.plan(), paper.bundle)
    with pytest.raises(AzureApiError, match=word):
        paper.simulator._check({**paper.sent()[0]["properties"], **change})


def test_doctor_says_what_is_missing(paper: Paper):
    assert paper.backend().check() == [] and paper.backend(compute="gpus").check() == []
    (problem,) = paper.backend(compute="none").check()
    assert problem.path == "options.azureml.compute" and "none" in problem.message
    (problem,) = paper.backend(store="az://absent@devstoreaccount1").check()
    assert problem.path == "options.azureml.store" and "ContainerNotFound" in problem.message
    assert paper.backend(workspace="other").check()[0].path == "options.azureml.workspace"


def test_permissions_are_a_role_of_the_group(paper: Paper):
    role = paper.backend().permissions(None)["azure-role.json"]
    assert role["AssignableScopes"] == [ID.partition("/providers/")[0]] and any(
        "jobs/write" in one for one in role["Actions"]
    )


@pytest.mark.parametrize("answers", [{"discoveryUrl": "http://10.0.0.7/x"}, {"api": "http://10.0.0.7"}])
def test_a_token_is_not_sent_to_an_address_that_is_not_encrypted(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]
):
    names = {"subscription": "s", "resource_group": "g", "workspace": "w"}
    workspace, asked = client.Workspace(names), []

    def call(self: Http, method: str, url: str, failure: str, **_: Any) -> Answer:
        asked.append(self._address(url))
        found = {"properties": {"discoveryUrl": "https://x", **answers}, "api": "https://y", **answers}
        return Answer(200, {}, json.dumps(found).encode())

    monkeypatch.setattr(Http, "call", call)
    monkeypatch.setattr(Tokens, "token", lambda self, scope: ("secret", 3600.0))
    with pytest.raises(BackendError, match="no token is sent to 'http://10.0.0.7"):
        workspace.run("a-job")
    assert asked and all("10.0.0.7" not in address for address, _ in asked)
