"""What the backend ssh makes of its machines' answers: which ones it takes, what it sends them, what it asks. None is reached."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cloudtrain.backends.api import Plan
from cloudtrain.backends.manifest import sent_record
from cloudtrain.backends.ssh import doctor, launch, machines
from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.backends.ssh.machines import Machine, make_handle
from cloudtrain.errors import BackendError, BadJob, NoCapacity, NoService, NotReached, Unreachable
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.nodes import common_folder
from cloudtrain.nodes.agents import Answer
from cloudtrain.source.bundle import Bundle
from cloudtrain.testing.clock import EPOCH, VirtualClock

NAMES = ("one", "two", "three")
NOT_PREPARED: dict[str, Any] = {"request": None, "first": 0, "bundle": False}
FOLDER = "/home/me/.cloudtrain/runs/r/a1"


class Scripted:
    """A machine that answers operations with given values, or raises them, and keeps what it was asked."""

    unreachable_s = 0.0

    def __init__(self, label: str) -> None:
        self.label = label
        self.answers: dict[str, Any] = {"clock": EPOCH, "prepare": NOT_PREPARED}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.waits: dict[str, float] = {}

    def ask(self, operation: str, given: bytes | None = None, *, timeout_s: float = 60.0, **arguments: Any) -> Answer:
        self.waits[operation] = timeout_s
        self.asked.append((operation, arguments | ({"given": given} if given is not None else {})))
        answer = self.answers[operation]
        if callable(answer):
            answer = answer(**arguments)
        if isinstance(answer, Exception):
            raise answer
        return Answer(None, answer) if isinstance(answer, bytes) else Answer(answer)

    def calls(self, operation: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.asked if name == operation]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> dict[str, Scripted]:
    """The machines by name, in place of those that a connection reaches."""
    found = {name: Scripted(name) for name in NAMES}
    monkeypatch.setattr(launch, "SYSTEM", VirtualClock())
    monkeypatch.setattr(machines, "RemoteAgent", lambda host, *_: found[host.address])
    monkeypatch.setattr(machines.ssh_config, "read", lambda *_: None)  # aliases have a test of their own
    return found


@pytest.fixture
def backend(fleet: dict[str, Scripted], tmp_path: Path) -> SshBackend:
    return SshBackend({"hosts": [{"address": name} for name in NAMES], "directory": "/home/me/.cloudtrain"}, tmp_path)


@pytest.fixture
def plan(backend: SshBackend, tmp_path: Path) -> Callable[..., Plan]:
    """Return a function: number of the attempt, changes to the job -> plan."""

    def plan(attempt: int = 1, **changes: Any) -> Plan:
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text("print(1)\n")
        job = Job.from_dict({"name": "r", "source": str(source), "entrypoint": "train.py", **changes})
        return backend.plan(job, Bundle.make(source, tmp_path / "bundles"), "r", attempt)

    return plan


def chosen(plan: Plan, begun: str | None = None) -> list[str]:
    return [machine.label for machine, _ in launch.choose_machines(plan, "/root", lambda _: begun)]


def test_the_first_machines_that_answer_are_taken(fleet, plan):
    assert chosen(plan()) == ["one"] and chosen(plan(num_nodes=2)) == ["one", "two"]
    for name in NAMES:
        (asked,) = fleet[name].calls("prepare")[:1]
        assert asked == {"root": "/root", "run": "r", "attempt": 1, "sha256": plan().bundle["sha256"]}
    fleet["one"].answers["prepare"] = Unreachable("one is away", "look at it")
    assert chosen(plan(num_nodes=2)) == ["two", "three"]
    fleet["three"].answers["prepare"] = NoService("three refuses")
    assert chosen(plan(num_nodes=2, min_nodes=1)) == ["two"]
    with pytest.raises(NotReached) as caught:
        chosen(plan(num_nodes=2))
    assert caught.value.message == "1 of 2 nodes can be reached: one is away (look at it); three refuses"
    assert caught.value.waits, "who is away may come back"
    fleet["one"].answers["prepare"] = fleet["two"].answers["prepare"] = NoService("nothing listens")
    with pytest.raises(NotReached) as caught:
        chosen(plan())
    assert not caught.value.waits


def test_a_later_attempt_begins_where_the_files_are(backend, fleet, plan):
    fleet["two"].answers["prepare"] = {**NOT_PREPARED, "first": 1}
    fleet["three"].answers["prepare"] = {**NOT_PREPARED, "first": 2}
    assert chosen(plan(3, num_nodes=3)) == ["three", "two", "one"]
    assert chosen(plan(3, output="/shared")) == ["one"], "all see the same folder"
    fleet["one"].answers["prepare"] = Unreachable("away")
    assert chosen(plan(3)) == ["three"]
    with pytest.raises(NotReached, match="no node that may have the checkpoints"):
        chosen(backend.plan_after(plan(4), 3))
    assert chosen(backend.plan_after(plan(4), 2)) == ["three"]
    fleet["two"].answers["prepare"] = fleet["three"].answers["prepare"] = NOT_PREPARED
    assert chosen(plan(1)) == ["two"], "a first attempt needs none"
    with pytest.raises(NotReached, match="no node that may have the checkpoints"):
        chosen(plan(2))
    assert chosen(backend.plan_after(plan(2), 0)) == ["two"]
    shared = plan(2, output="/shared")
    assert backend.plan_after(shared, 1) == shared, "all machines have its files"
    assert chosen(plan(2, output="/shared")) == ["two"]


def test_an_interrupted_submit_is_repeated_on_its_machines(fleet, plan):
    fleet["one"].answers["prepare"] = fleet["three"].answers["prepare"] = {
        **NOT_PREPARED,
        "request": {"hosts": ["three", "one"]},
    }
    assert chosen(plan(num_nodes=2)) == ["three", "one"]
    fleet["two"].answers["prepare"] = {**NOT_PREPARED, "request": {"hosts": ["two"]}}
    made = plan(num_nodes=2)
    assert chosen(made, make_handle(["two"], made.request["folder"])) == ["two"]
    assert chosen(made) == ["three", "one"], "none has begun: the first choice"
    fleet["two"].answers["prepare"] = NOT_PREPARED
    fleet["one"].answers["prepare"] = Unreachable("one is away")
    with pytest.raises(Unreachable, match="one is away"):
        chosen(made)


def test_a_login_that_is_refused_is_an_error_or_brings_the_next_candidate(fleet, plan):
    fleet["two"].answers["prepare"] = BackendError("two takes no such key", "ssh-add it")
    with pytest.raises(BackendError) as caught:
        chosen(plan())
    assert caught.value.message == "two takes no such key (ssh-add it)" and not isinstance(caught.value, NoCapacity)
    with pytest.raises(NoCapacity, match="no such key"):
        chosen(replace(plan(), candidates=({"target": "a"}, {"target": "b"})))


def test_machines_with_too_few_gpus_are_left_out(fleet, plan):
    for name, count in zip(NAMES, (1, 2, 4), strict=True):
        fleet[name].answers["command"] = "".join(f"GPU {n}: A100 (UUID: GPU-{n})\n" for n in range(count))
    assert chosen(plan(resources={"accelerators": "A100:2"})) == ["two"]
    assert fleet["one"].calls("command") == [{"argv": ["nvidia-smi", "-L"]}]
    with pytest.raises(BackendError) as caught:
        chosen(plan(num_nodes=2, resources={"accelerators": "A100:4"}))
    assert caught.value.message.endswith("(nvidia-smi): one 1, two 2, three 4") and "resources" in caught.value.hint
    assert chosen(plan(num_nodes=2, min_nodes=1, resources={"accelerators": "A100:4"})) == ["three"]
    fleet["one"].answers["command"] = Unreachable("gone since")
    with pytest.raises(Unreachable, match="gone since"):
        chosen(plan(resources={"accelerators": "A100:2"}))


@pytest.mark.parametrize(("share", "mode"), [(None, 0o600), ("group", 0o640)])
def test_an_output_is_the_same_folder_on_all_machines(backend, fleet, plan, tmp_path, share: str | None, mode: int):
    both = backend.machines[:2]
    made = plan(num_nodes=2, output="/shared")
    if share:
        shared = SshBackend({"hosts": [{"address": name} for name in NAMES], "share": share}, tmp_path)
        made = replace(made, request={**made.request, "env": made.request["env"] | {"CLOUDTRAIN_UMASK": shared.umask}})
    fleet["one"].answers["write"] = None
    fleet["two"].answers["read"] = lambda path: fleet["one"].calls("write")[-1]["given"]
    launch.check_shared_output(made, both)
    (wrote,) = fleet["one"].calls("write")
    assert wrote["path"] == "/shared/r/.shared" and wrote["mode"] == mode and len(wrote["given"]) == 16
    assert fleet["two"].calls("read") == [{"path": "/shared/r/.shared"}]
    fleet["two"].answers["read"] = b"another one"
    with pytest.raises(BackendError, match="the output /shared is not the same folder on two and one"):
        launch.check_shared_output(made, both)
    fleet["two"].answers["read"] = Unreachable("two is away")
    with pytest.raises(Unreachable, match="two is away"):
        launch.check_shared_output(made, both)
    asked = len(fleet["one"].asked)
    launch.check_shared_output(made, both[:1])
    launch.check_shared_output(plan(num_nodes=2), both)
    assert len(fleet["one"].asked) == asked, "nothing to compare"


def test_what_a_node_is_started_with(backend, fleet, plan):
    made = plan(num_nodes=2, env={"MINE": "a b"})
    pair = [Machine({"python": "/opt/python"}, {"address": "one", "internal": "10.0.0.1"}), backend.machines[1]]
    for name in ("one", "two"):
        fleet[name].answers["launch"] = [("control", "10.0.0.1:9")]
    fleet["two"].answers["clock"] = EPOCH - 60
    secrets = {"secrets": {"TOKEN": "x"}, "token": "t"}
    assert launch.launch_node(made, pair, 0, None, secrets) == {"control": "10.0.0.1:9"}
    launch.launch_node(made, pair, 1, "10.0.0.1:9", secrets)
    (first,), (second,) = fleet["one"].calls("launch"), fleet["two"].calls("launch")
    folder = made.request["folder"]
    assert (first["node"], second["node"]) == (f"{folder}/node-0", f"{folder}/node-1")
    assert first["argv"] == ["/opt/python", ".cloudtrain/launch.py"] and second["argv"][0] == "python3"
    assert first["secrets"] == second["secrets"] == secrets
    names = ("HOST", "NODE_RANK", "NUM_NODES", "NODE_DIR", "CONTROL")
    of_first, of_second = ([each["env"].get(f"CLOUDTRAIN_{name}") for name in names] for each in (first, second))
    assert of_first == ["10.0.0.1", "0", "2", f"{folder}/node-0", None], "node 0 says where it listens"
    assert of_second == ["two", "1", "2", f"{folder}/node-1", "10.0.0.1:9"]
    assert "CLOUDTRAIN_CLOCK_OFFSET_S" not in first["env"]
    assert second["env"]["CLOUDTRAIN_CLOCK_OFFSET_S"] == "60.0"


@pytest.mark.parametrize("begun", [True, False, None])
def test_an_attempt_has_begun_where_all_its_nodes_have(backend, fleet, begun: bool | None):
    request = {"hosts": ["one", "two"], "least": 2}
    for name in NAMES:
        fleet[name].answers |= {
            "request": request if name != "three" else None,
            "begun": True,
            "cancel": None,
            "end": None,
        }
    fleet["two"].answers["begun"] = Unreachable("two is away") if begun is None else begun
    handle = make_handle(["one", "two"], "/home/me/.cloudtrain/runs/r/a1")
    assert backend.find("r-a1") == (None if begun is False else handle)
    assert fleet["two"].calls("request") == [{"folder": FOLDER}]
    assert fleet["two"].calls("begun") == [{"node": f"{FOLDER}/node-1"}]
    fleet["one"].answers["begun"] = Unreachable("one is away")
    if begun is True:
        assert backend.find("r-a1") == handle, "node 0 begins before the others"
    else:
        with pytest.raises(Unreachable, match="is away"):
            backend.find("r-a1")
        with pytest.raises(Unreachable, match="is away"):
            backend.discard("r-a1")
        assert not fleet["one"].calls("cancel")
    fleet["one"].answers["begun"] = True
    backend.discard("r-a1")
    for rank, name in enumerate(("one", "two")):
        assert fleet[name].calls("cancel") == [{"folder": FOLDER, "rank": rank}]
        assert fleet[name].calls("end") == [{"node": f"{FOLDER}/node-{rank}"}]
    assert not fleet["three"].calls("cancel")


@pytest.mark.parametrize(("least", "known"), [(1, False), (2, True), (None, False)])
def test_who_does_not_answer_may_have_begun_where_all_of_an_attempt_may_be(
    backend, fleet, least: int | None, known: bool
):
    for name in NAMES:
        fleet[name].answers["request"] = None
    fleet["one"].answers["request"] = Unreachable("one is away")
    if least:  # another attempt's machines, of which too many answer
        fleet["two"].answers |= {"request": {"hosts": ["two", "nowhere"], "least": least}}
    if known:
        assert backend.find("r-a1") is None
    else:
        with pytest.raises(Unreachable, match="one is away"):
            backend.find("r-a1")


def test_files_are_fetched_from_every_node_or_once_where_all_share_them(backend, fleet, tmp_path, monkeypatch):
    brought: list[Any] = []
    missing: list[int] = []

    def download(agents: Any, folder: str, into: Path) -> list[int]:
        brought.append(([agent.label for agent in agents], folder, into.name))
        return missing

    monkeypatch.setattr(common_folder, "download_nodes", download)
    handle = make_handle(["one", "two"], FOLDER)
    for name in ("one", "two"):
        fleet[name].answers["request"] = {"run_dir": "/home/me/.cloudtrain/runs/r"}
    assert backend.fetch(handle, tmp_path / "into", ("model", "outputs")) == tmp_path / "into"
    both = ["one", "two"]
    assert brought == [(both, f"/home/me/.cloudtrain/runs/r/{name}", name) for name in ("model", "outputs")]
    missing.append(1)
    with pytest.raises(Unreachable, match=r"^node 1 \(two\) cannot be reached: .*into lacks its files"):
        backend.fetch(handle, tmp_path / "into", ("model",))
    missing.clear()
    for name in ("one", "two"):
        fleet[name].answers["request"] = {"run_dir": "/shared/r"} if name == "two" else Unreachable("one is away")
    brought.clear()
    backend.fetch(handle, tmp_path / "into", ("model",))
    assert brought == [(["two"], "/shared/r/model", "model")]
    fleet["two"].answers["request"] = None
    with pytest.raises(Unreachable, match="one is away"):
        backend.fetch(handle, tmp_path / "into")
    fleet["one"].answers["request"] = None
    with pytest.raises(BackendError, match=f"^{handle} does not exist: ") as caught:
        backend.fetch(handle, tmp_path / "into")
    assert caught.value.hint


def test_a_run_that_is_asked_for_keeps_its_lease_where_the_client_holds_it(fleet, tmp_path):
    hosts = [{"address": name} for name in NAMES]
    for lease in ("client", "supervisors"):
        made = SshBackend({"hosts": hosts, "lease": lease}, tmp_path)
        fleet["one"].answers["report"] = Unreachable("one is away")
        with pytest.raises(Unreachable):
            made.status(make_handle(["one"], FOLDER))
        assert fleet["one"].calls("report")[-1] == {"folder": FOLDER, "rank": 0, "lease": lease == "client"}
    assert made.status(make_handle(["four"], FOLDER)).state is State.LOST


def test_labels_come_from_the_first_machine_that_has_them(backend, fleet):
    kept = json.dumps({"hosts": ["one"], "labels": {"team": "vision"}}).encode()
    handle = make_handle(["one", "two"], FOLDER)
    fleet["one"].answers["read"] = Unreachable("one is away")
    fleet["two"].answers["read"] = lambda path, limit: kept if path == f"{FOLDER}/request.json" else b""
    assert backend.labels(handle) == {"team": "vision"}
    fleet["one"].answers["read"] = b""
    assert backend.labels(handle) == {"team": "vision"}
    for damaged in (b"{", b"[]", b'{"labels": 3}'):
        fleet["one"].answers["read"] = damaged
        assert "team" not in backend.labels(handle)
    fleet["one"].answers["read"] = fleet["two"].answers["read"] = Unreachable("nobody answers")
    with pytest.raises(Unreachable, match="nobody answers"):
        backend.labels(handle)


def test_attempts_are_found_by_their_label(backend, fleet):
    manifest = {"run_id": "r"}
    texts = {
        f"r/a{n}/request.json": json.dumps({"labels": {"home": "this" if n < 4 else "that"}}) for n in (1, 2, 3, 4)
    }
    for name in ("one", "two"):
        fleet[name].answers |= {"texts": texts, "request": {"hosts": ["one"]}, "begun": True}
        fleet[name].answers["read"] = json.dumps({"manifest": manifest, "target": "lab"}).encode()
    fleet["three"].answers |= {"texts": {}, "request": None}
    fleet["one"].answers["request"] = lambda folder: None if folder.endswith("a3") else {"hosts": ["one"]}
    fleet["two"].answers["request"] = None
    found = list(backend.labelled("home", "this", {"r-a2"}))
    assert [(each.attempt_id, each.handle) for each in found] == [("r-a1", make_handle(["one"], FOLDER))]
    assert found[0].record == {"manifest": manifest, "about": {"manifest": manifest, "target": "lab"}}
    assert fleet["one"].calls("texts")[0] == {"folder": "/home/me/.cloudtrain/runs", "patterns": ["*/a*/request.json"]}
    assert fleet["one"].calls("read")[0] == {"path": f"{FOLDER}/plan.json"}
    fleet["three"].answers["texts"] = Unreachable("three is away")
    rest = backend.labelled("home", "this", set())
    assert next(rest).attempt_id == "r-a1"
    with pytest.raises(Unreachable, match="three is away"):
        list(rest)


def test_what_the_plan_says_of_gpus_leases_and_machines(plan, tmp_path):
    assert (
        plan(resources={"accelerators": "A100:1"}, limits={"max_wait": "2h"}).request["env"]["CLOUDTRAIN_GPU_WAIT_S"]
        == "7200"
    )
    assert "CLOUDTRAIN_GPU_WAIT_S" not in plan(resources={"accelerators": "A100:1"}).request["env"]
    assert "CLOUDTRAIN_GPU_WAIT_S" not in plan(limits={"max_wait": "2h"}).request["env"]
    with pytest.raises(BadJob) as caught:
        plan(num_nodes=4)
    (problem,) = caught.value.problems
    assert (problem.message, problem.path) == ("is 4, but options.ssh.hosts names 3", "num_nodes") and problem.hint
    (problem,) = SshBackend({}, tmp_path).check()
    assert (problem.message, problem.path) == ("no machines are set", "options.ssh.hosts") and problem.hint


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("lost_after_s", (0.1, 864_000), (0, 864_001)),
        ("lease_s", (5, 864_000), (4.9, 864_001)),
        ("port", (1, 65535), (65536,)),
    ],
)
def test_the_bounds_of_options(name: str, good: tuple[float, ...], bad: tuple[float, ...]):
    for value in good:
        SshBackend.options().model_validate({name: value})
    for value in bad:
        with pytest.raises(ValidationError):
            SshBackend.options().model_validate({name: value})


FACTS: dict[str, Any] = {
    "python": [3, 11], "torch": "2.4", "gpus": 8, "free_bytes": 1 << 40, "writable": True, "folder": "/data",
    "executable": "/usr/bin/python3",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"torch": None}, "two: /usr/bin/python3 cannot import torch"),
        ({"writable": False, "free_bytes": 0}, "two: /data cannot be written"),
        ({"free_bytes": (1 << 30) - 1}, "two: 1,023 MiB are free below /data, less than 1 GiB"),
        ({"free_bytes": 1 << 30}, ""),
        ({"gpus": 4}, "the machines have different numbers of GPUs: [4, 8]"),
        ({"clock": 30}, "two: its clock differs by 30 s from this machine's"),
        ({"listen": BackendError("no port is free")}, "two: cannot listen on any port of 10.0.0.2 (no port is free)"),
        ({"reach": "timed out"}, "two does not reach 10.0.0.1:4001 of one: timed out"),
    ],
)
def test_doctor_names_what_is_wrong_with_a_machine(fleet, changes: dict[str, Any], message: str):
    for name in ("one", "two"):
        fleet[name].answers |= {"facts": FACTS, "listen": 4001, "reach": None}
    for name in ("listen", "reach"):
        fleet["two"].answers[name] = changes.get(name, fleet["two"].answers[name])
    fleet["two"].answers["facts"] = {**FACTS, **{name: value for name, value in changes.items() if name in FACTS}}
    if "clock" in changes:
        fleet["two"].answers["clock"] = EPOCH - changes["clock"]
    asked = [(name, fleet[name], f"10.0.0.{number}") for number, name in enumerate(("one", "two"), start=1)]
    problems, lines = doctor.check_machines(asked, "/data")
    assert [problem.message for problem in problems] == [message] * bool(message)
    assert all(problem.hint for problem in problems) or "gpus" in changes
    assert lines.keys() == {"one", "two"} and lines["one"].startswith(
        "reached: Python 3.11, torch 2.4, 8 GPUs, 1.1 TB free"
    )
    assert fleet["one"].calls("facts") == [{"root": "/data"}] and fleet["one"].calls("listen") == [{"host": "10.0.0.1"}]
    if not isinstance(changes.get("listen"), Exception):
        assert fleet["one"].calls("reach") == [{"host": "10.0.0.2", "port": 4001}]


def test_doctor_goes_on_after_a_machine_that_is_away(fleet):
    for name in NAMES:
        fleet[name].answers |= {"facts": FACTS, "listen": 4001, "reach": None}
    fleet["one"].answers["facts"] = Unreachable("one is away", "look at it")
    problems, lines = doctor.check_machines([(name, fleet[name], name) for name in NAMES], "/data")
    assert [(problem.message, problem.hint) for problem in problems] == [("one is away", "look at it")]
    assert lines["one"] == "not reached" and lines["three"].startswith("reached")
    assert not fleet["one"].calls("listen") and fleet["two"].calls("reach") == [{"host": "three", "port": 4001}]


def test_doctor_shows_what_it_found_on_each_machine(backend, fleet):
    for name in NAMES:
        fleet[name].answers |= {"facts": FACTS, "listen": 4001, "reach": None}
    assert backend.check() == []
    lines = backend.checked_machines()
    assert list(lines) == list(NAMES) and all(line.startswith("reached: Python 3.11") for line in lines.values())


def answers_of_a_submit(fleet: dict[str, Scripted], *, control: str = "10.0.0.1:9") -> None:
    for name in NAMES:
        fleet[name].answers |= dict.fromkeys(("folders", "extract", "write", "cancel"))
        fleet[name].answers |= {"token": "the shared word", "launch": [("control", control)], "prepare": PRESENT}


PRESENT: dict[str, Any] = {**NOT_PREPARED, "bundle": True}


def test_a_submit_brings_the_source_the_plan_and_the_request_to_each_machine_and_starts_it(
    backend, fleet, plan, tmp_path, monkeypatch
):
    monkeypatch.setenv("PLANTED", "of the shell")
    made = plan(2, num_nodes=2, labels={"team": "nlp"}, secrets={"TOKEN": ["env:PLANTED"]})
    (bundle,) = (Bundle.stored(tmp_path / "bundles", str(made.bundle["sha256"])),)
    answers_of_a_submit(fleet)
    fleet["two"].answers["prepare"] = {**PRESENT, "first": 1}
    assert backend.submit(made, bundle) == make_handle(["two", "one"], made.request["folder"])
    assert not fleet["three"].calls("launch"), "two nodes are asked for"
    folder, root = made.request["folder"], "/home/me/.cloudtrain"
    secrets = {"secrets": {"env:PLANTED": "of the shell"}, "token": "the shared word"}
    request = {"hosts": ["two", "one"], "run_dir": f"{root}/runs/r", "labels": {"team": "nlp"}, "least": 2}
    for rank, name in enumerate(("two", "one")):
        assert fleet[name].calls("folders") == [{"path": folder, "mode": 0o700}]
        into = f"{folder}/node-{rank}/source"
        assert fleet[name].calls("extract") == [{"root": root, "sha256": bundle.sha256, "into": into, "mode": 0o700}]
        wrote = {call["path"]: call["given"] for call in fleet[name].calls("write")}
        assert wrote[f"{folder}/plan.json"].decode() == made.to_json()
        assert json.loads(wrote[f"{folder}/request.json"]) == request
        assert wrote.get(f"{root}/runs/r/first") == (b"2" if rank == 0 else None)
        (launched,) = fleet[name].calls("launch")
        assert launched["secrets"] == secrets and launched["node"] == f"{folder}/node-{rank}"
        assert launched["env"].get("CLOUDTRAIN_CONTROL") == (None if rank == 0 else "10.0.0.1:9")
    assert fleet["two"].calls("token") == [{"folder": folder}] and not fleet["one"].calls("token")


def test_roles_that_share_machines_are_started_on_the_same_one(backend, fleet, plan, tmp_path):
    roles = {"trainer": {"num_nodes": 2}, "server": {"run": "serve", "colocate": "trainer"}}
    made = plan(1, roles=roles)
    (bundle,) = (Bundle.stored(tmp_path / "bundles", str(made.bundle["sha256"])),)
    answers_of_a_submit(fleet)
    backend.submit(made, bundle)
    started = {name: [call["node"].rpartition("/")[2] for call in fleet[name].calls("launch")] for name in NAMES}
    assert {name: sorted(nodes) for name, nodes in started.items()} == {
        "one": ["node-0", "node-2"],
        "two": ["node-1", "node-3"],
        "three": [],
    }


def test_a_submit_of_one_node_has_a_token_of_its_own_and_node_0_that_has_ended_starts_no_other(
    backend, fleet, plan, tmp_path
):
    answers_of_a_submit(fleet, control="")
    made = plan()
    bundle = Bundle.stored(tmp_path / "bundles", str(made.bundle["sha256"]))
    backend.submit(made, bundle)
    backend.submit(made, bundle)
    first, second = (call["secrets"]["token"] for call in fleet["one"].calls("launch"))
    assert first != second and len(first) == 32 and not fleet["one"].calls("token")
    backend.submit(plan(num_nodes=2), bundle)
    assert len(fleet["one"].calls("launch")) == 3 and not fleet["two"].calls("launch")


@pytest.mark.parametrize("known", [True, False])
def test_a_node_that_is_refused_ends_those_that_were_started(backend, fleet, plan, tmp_path, known: bool):
    answers_of_a_submit(fleet)
    fleet["two"].answers["launch"] = BackendError("no python3 there", "install it")
    if not known:
        fleet["one"].answers["cancel"] = Unreachable("one is away")
    made = plan(num_nodes=2)
    with pytest.raises(BackendError if known else Unreachable, match="^no python3 there") as caught:
        backend.submit(made, Bundle.stored(tmp_path / "bundles", str(made.bundle["sha256"])))
    assert known or "its other nodes may run: " in caught.value.message
    assert caught.value.hint == "install it"
    assert fleet["one"].calls("cancel") == [{"folder": made.request["folder"], "rank": 0}]


def test_the_umask_of_a_shared_home_is_that_of_the_folders(fleet, plan, tmp_path):
    answers_of_a_submit(fleet)
    shared = SshBackend(
        {"hosts": [{"address": "one"}], "directory": "/home/me/.cloudtrain", "share": "group"}, tmp_path
    )
    made = plan()
    made = replace(made, request={**made.request, "env": made.request["env"] | {"CLOUDTRAIN_UMASK": shared.umask}})
    shared.submit(made, Bundle.stored(tmp_path / "bundles", str(made.bundle["sha256"])))
    assert fleet["one"].calls("folders")[0]["mode"] == fleet["one"].calls("extract")[0]["mode"] == 0o750
    older = {name: value for name, value in made.request["env"].items() if name != "CLOUDTRAIN_UMASK"}
    shared.submit(
        replace(made, request={**made.request, "env": older}),
        Bundle.stored(tmp_path / "bundles", str(made.bundle["sha256"])),
    )
    assert fleet["one"].calls("folders")[1]["mode"] == 0o700, "a plan of an older version"


def test_many_attempts_are_asked_for_with_one_request_to_each_machine(fleet, tmp_path, monkeypatch):
    asked: list[tuple[str, str, list[dict[str, Any]]]] = []
    states = {f"{FOLDER}0": "RUNNING", f"{FOLDER}1": "STARTING"}

    def begin_each(agent: Scripted, name: str, arguments: list[dict[str, Any]]) -> Future[Any]:
        asked.append((agent.label, name, arguments))
        future: Future[Any] = Future()
        if agent.label != "two":  # it answers late
            future.set_result([report(states[each["folder"]]) for each in arguments])
        return future

    def read_each(agent: Scripted, future: Future[Any]) -> list[Any]:
        if agent.label == "three":
            raise Unreachable("three is away")
        return future.result()

    monkeypatch.setattr(machines, "LATE_S", 0.01)
    monkeypatch.setattr(machines, "begin_each", begin_each)
    monkeypatch.setattr(machines, "read_each", read_each)
    hosts = [{"address": name} for name in NAMES]
    one = [make_handle(["one"], f"{FOLDER}{number}") for number in (0, 1)]
    late, away = make_handle(["one", "two"], f"{FOLDER}0"), make_handle(["three"], f"{FOLDER}1")
    for lease in ("client", "supervisors"):
        made = SshBackend({"hosts": hosts, "lease": lease}, tmp_path)
        asked.clear()
        found = made.statuses([*one, late, away, make_handle(["four"], FOLDER)])
        assert {handle: status.state for handle, status in found.items()} == {
            one[0]: State.RUNNING,
            one[1]: State.STARTING,
        }
        assert [(label, name, len(each)) for label, name, each in asked] == [
            ("one", "report", 3),
            ("two", "report", 1),
            ("three", "report", 1),
        ]
        assert asked[0][2][1] == {"folder": f"{FOLDER}1", "rank": 0, "lease": lease == "client"}
        assert asked[1][2] == [{"folder": f"{FOLDER}0", "rank": 1, "lease": lease == "client"}]
    with pytest.raises(Unreachable, match="three is away"):
        made.statuses([away])
    assert made.statuses([]) == {}


def report(state: str) -> dict[str, Any]:
    """Return what a node that lives reports."""
    node = {"state": state, "exit_code": None, "reason": "", "started_at": None, "ended_at": None, "raw": {}}
    return {"state": node, "request": {}}


def test_a_machine_is_reached_as_its_host_and_the_options_say(monkeypatch):
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(machines, "RemoteAgent", lambda *given: made.append(given))
    shared = {
        "user": "all",
        "identity": "key",
        "jump": "gate",
        "known_hosts": "hosts",
        "setup": ["module load"],
        "port": 22,
    }
    machine = Machine({**shared, "python": "python3.12"}, {"address": "one", "user": "me", "port": 2222})
    ((host, python, setup),) = made
    assert (host.address, host.port, host.user, host.jump) == ("one", 2222, "me", "gate")
    assert (host.identity, host.known_hosts) == ("key", "hosts")
    assert (python, setup) == ("python3.12", ("module load",))
    assert machine.to_dict() == {
        **shared, "address": "one", "user": "me", "port": 2222, "internal": "one", "python": "python3.12",
    }  # fmt: skip


def test_the_plan_has_what_it_was_made_of_where_results_go_to_a_folder(plan):
    assert sent_record(plan(output="/shared").request["env"])["about"]["backend"] == "ssh"
    assert not sent_record(plan().request["env"])["about"]


@pytest.mark.parametrize(("behind", "offset_s"), [(2.0, 0.0), (2.1, 2.1), (-2.0, 0.0), (-3, -3.0)])
def test_a_difference_of_two_seconds_is_no_skew(fleet, behind: float, offset_s: float):
    fleet["one"].answers["clock"] = EPOCH - behind
    assert launch.clock_offset_s(fleet["one"]) == pytest.approx(offset_s)


def test_a_host_needs_nothing_but_an_address():
    options = SshBackend.options()
    given = {"hosts": [{"address": "one"}]}
    assert options.model_validate(given).model_dump(exclude_unset=True) == given and options.model_validate({})
    for host in ({}, {"address": ""}, {"address": "one", "port": 0}, {"address": "one", "port": 65536}):
        with pytest.raises(ValidationError):
            options.model_validate({"hosts": [host]})


def test_each_node_gets_the_gpus_of_its_role(backend, fleet, plan):
    made = plan(num_nodes=2)
    gpus = {"CLOUDTRAIN_GPUS": "${node.gpus}", "CLOUDTRAIN_SHARED_GPUS": "${node.shared}"}
    made = replace(made, request={**made.request, "gpus": [2, 0], "env": made.request["env"] | gpus})
    for rank, name in enumerate(("one", "two")):
        fleet[name].answers["launch"] = [("control", "10.0.0.1:9")]
        launch.launch_node(made, backend.machines[:2], rank, "10.0.0.1:9", {})
    given = [[fleet[name].calls("launch")[0]["env"][each] for each in gpus] for name in ("one", "two")]
    assert given == [["0,1", "1"], ["", ""]]
