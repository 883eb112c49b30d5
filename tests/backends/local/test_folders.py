"""What the backend local leaves on the disk, gives to its supervisors, and copies back. No supervisor is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.backends.local import backend as local
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.backends.manifest import sent_record
from cloudtrain.errors import BackendError
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.nodes import supervisor
from cloudtrain.nodes.agents import Answer, LocalAgent
from cloudtrain.source.bundle import Bundle
from cloudtrain.testing.clock import VirtualClock

PYTHON = "/usr/bin/python-of-the-job"
CONTROL = {"host": "127.0.0.1", "port": 4321}


class Starts:
    """Takes the place of `supervisor.start`: keeps what it was given, and writes the status of a node that runs."""

    def __init__(self) -> None:
        self.given: list[tuple[Path, list[str], dict[str, str], dict[str, Any]]] = []
        self.status: dict[str, Any] = {"state": "RUNNING", "control": CONTROL}

    def __call__(self, node: Path, argv: list[str], env: dict[str, str], secrets: dict[str, Any]) -> bool:
        self.given.append((node, argv, env, secrets))
        (node / "started").touch()
        (node / "status.json").write_text(json.dumps(self.status))
        return True


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    found = Starts()
    monkeypatch.setattr(supervisor, "start", found)
    return found


@pytest.fixture
def backend(home: Path, starts: Starts) -> LocalBackend:
    return LocalBackend({"python": PYTHON}, home / "runs", VirtualClock())


@pytest.fixture
def prepare(backend: LocalBackend, tmp_path: Path) -> Callable[..., tuple[Plan, Bundle]]:
    def prepare(attempt: int = 1, **changes: Any) -> tuple[Plan, Bundle]:
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text("print(1)\n")
        job = Job.from_dict({"name": "r", "source": str(source), "entrypoint": "train.py", **changes})
        bundle = Bundle.make(source, tmp_path / "bundles")
        return backend.plan(job, bundle, "r", attempt), bundle

    return prepare


def test_a_submit_writes_the_request_the_labels_and_the_source_and_starts_each_node(
    backend, prepare, starts, home, monkeypatch
):
    monkeypatch.setenv("PLANTED", "of the shell")
    monkeypatch.setenv("KEPT", "of the shell too")
    monkeypatch.setenv("RANK", "7")
    plan, bundle = prepare(2, num_nodes=2, labels={"team": "nlp"}, env={"A": "b"}, secrets={"TOKEN": ["env:PLANTED"]})
    folder = home / "runs" / "r" / "a2"
    assert backend.find(plan.attempt_id) is None
    assert backend.submit(plan, bundle) == str(folder) == backend.find("r-a2") and backend.find("r-a1") is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert json.loads((folder / "request.json").read_text()) == plan.request
    assert json.loads((folder / "labels.json").read_text()) == {"team": "nlp"}
    assert [node for node, *_ in starts.given] == [folder / "node-0", folder / "node-1"]
    for rank, (node, argv, env, _) in enumerate(starts.given):
        assert (node / "source" / "train.py").read_text() == "print(1)\n" and (node / "source" / argv[1]).is_file()
        assert argv == [PYTHON, ".cloudtrain/launch.py"]
        asked = plan.request["nodes"][rank]["env"]
        assert asked.items() <= env.items() and env["KEPT"] == "of the shell too"
        assert (env["CLOUDTRAIN_NODE_RANK"], env["CLOUDTRAIN_STDIN"]) == (str(rank), "1")
        assert "PLANTED" not in env and "RANK" not in env
        assert env.get("CLOUDTRAIN_CONTROL") == (None if rank == 0 else "127.0.0.1:4321")
    (_, _, _, first), (_, _, _, second) = starts.given
    assert first == second == {"secrets": {"env:PLANTED": "of the shell"}, "token": first["token"]}
    assert len(first["token"]) >= 32
    assert [(node.rank, node.attempt) for node in backend.nodes(str(folder))] == [(0, str(folder)), (1, str(folder))]
    assert list(backend.run_folders(str(folder))) == [str(folder.parent)]


def test_a_plan_has_the_folders_the_command_and_where_results_go(prepare, home, tmp_path):
    one, _ = prepare(3)
    (node,) = one.request["nodes"]
    assert node["folder"] == node["env"]["CLOUDTRAIN_NODE_DIR"] == str(home / "runs" / "r" / "a3" / "node-0")
    assert node["env"]["CLOUDTRAIN_ATTEMPT_ID"] == "r-a3" and not any("nodes" in note for note in one.notes)
    assert node["env"]["CLOUDTRAIN_RUN_DIR"] == str(home / "runs" / "r") and not sent_record(node["env"])["about"]
    two, _ = prepare(num_nodes=2, output=str(tmp_path / "out"))
    assert [Path(node["folder"]).name for node in two.request["nodes"]] == ["node-0", "node-1"]
    assert [node["env"]["CLOUDTRAIN_NODE_RANK"] for node in two.request["nodes"]] == ["0", "1"]
    assert "2 nodes run as groups of processes on this machine" in two.notes
    assert two.request["nodes"][1]["env"]["CLOUDTRAIN_RUN_DIR"] == str(tmp_path / "out" / "r")
    assert sent_record(two.request["nodes"][0]["env"])["about"]["backend"] == "local"


def test_each_attempt_of_one_node_has_a_token_of_its_own(backend, prepare, starts):
    for attempt in (1, 2):
        backend.submit(*prepare(attempt))
    assert starts.given[0][3]["token"] != starts.given[1][3]["token"]


def test_a_repeated_submit_leaves_the_source_alone_and_asks_no_started_node_for_its_address(
    backend, prepare, starts, home
):
    plan, bundle = prepare(num_nodes=2)
    backend.submit(plan, bundle)
    written = home / "runs" / "r" / "a1" / "node-1" / "source" / "train.py"
    written.write_text("changed by the job\n")
    (home / "runs" / "r" / "a1" / "node-0" / "status.json").unlink()
    backend.submit(plan, bundle)
    assert written.read_text() == "changed by the job\n"
    assert len(starts.given) == 4 and "CLOUDTRAIN_CONTROL" not in starts.given[3][2]


@pytest.mark.parametrize("status", [{"state": "FAILED", "exit_code": 1}, {"state": "STARTING", "pid": 1}])
def test_other_nodes_wait_until_the_first_listens_or_ends(backend, prepare, starts, status, monkeypatch):
    monkeypatch.setattr("cloudtrain.backends.local.backend.JOIN_S", 1.0)
    starts.status = status
    before = backend._clock.monotonic()
    backend.submit(*prepare(num_nodes=2))
    assert len(starts.given) == 1, "node 0 alone"
    waited = backend._clock.monotonic() - before
    assert waited == 0 if status["state"] == "FAILED" else waited >= 1


def test_a_launcher_that_cannot_be_started_ends_what_runs(backend, prepare, starts, home, monkeypatch):
    def start(node: Path, *given: Any) -> bool:
        if node.name == "node-1":
            raise PermissionError(13, "Permission denied")
        return starts(node, *given)

    cancelled: list[str] = []
    monkeypatch.setattr(supervisor, "start", start)
    monkeypatch.setattr(LocalBackend, "cancel", lambda _, handle: cancelled.append(handle))
    with pytest.raises(BackendError, match="^the launcher cannot be started on this machine: Permission denied$"):
        backend.submit(*prepare(num_nodes=2))
    assert cancelled == [str(home / "runs" / "r" / "a1")], "node 0 runs"


def test_a_full_disk_is_a_sentence(backend, prepare, starts, home, monkeypatch):
    def extract(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Bundle, "extract", extract)
    with pytest.raises(BackendError) as caught:
        backend.submit(*prepare())
    assert caught.value.message == f"{home / 'runs' / 'r' / 'a1'} cannot be prepared: No space left on device"
    assert caught.value.hint == "free some disk space" and not starts.given


def test_fetch_copies_what_is_asked_of_all_nodes(backend, prepare, home, tmp_path):
    plan, bundle = prepare(num_nodes=2)
    handle = backend.submit(plan, bundle)
    for name in ("outputs", "model"):
        (home / "runs" / "r" / name).mkdir()
        (home / "runs" / "r" / name / "file").write_text(name)
    (Path(handle) / "node-1" / "source" / "made.txt").write_text("by node 1")
    into = tmp_path / "deep" / "into"
    assert backend.fetch(handle, into, ("outputs", "checkpoints", "workdir")) == into
    assert sorted(path.name for path in into.iterdir()) == ["outputs", "workdir"]
    assert (into / "outputs" / "file").read_text() == "outputs"
    assert sorted(path.name for path in (into / "workdir" / "node-1").iterdir()) == ["made.txt", "train.py"]
    assert [path.name for path in (into / "workdir" / "node-0").iterdir()] == ["train.py"]
    assert backend.fetch(handle, into) == into and (into / "model" / "file").read_text() == "model", "a second time"


def test_fetch_reads_the_output_that_the_job_names(backend, prepare, tmp_path):
    handle = backend.submit(*prepare(output=str(tmp_path / "out")))
    (tmp_path / "out" / "r" / "model").mkdir(parents=True)
    (tmp_path / "out" / "r" / "model" / "file").write_text("there")
    assert (backend.fetch(handle, tmp_path / "into") / "model" / "file").read_text() == "there"


def test_a_moved_home_has_the_attempt_and_its_results(backend, prepare, home, tmp_path):
    handle = backend.submit(*prepare())
    (home / "runs" / "r" / "outputs").mkdir()
    (home / "runs" / "r" / "outputs" / "file").write_text("here")
    home.rename(tmp_path / "moved")
    later = LocalBackend({"python": PYTHON}, tmp_path / "moved" / "runs")
    assert [node.attempt for node in later.nodes(handle)] == [str(tmp_path / "moved" / "runs" / "r" / "a1")]
    assert list(later.run_folders(handle)) == [str(tmp_path / "moved" / "runs" / "r")]
    assert (later.fetch(handle, tmp_path / "into") / "outputs" / "file").read_text() == "here"


def test_a_cancel_of_an_attempt_that_has_ended_kills_what_is_left_of_each_node(backend, prepare, starts, monkeypatch):
    asked: list[tuple[str, dict[str, Any]]] = []
    ask = LocalAgent.ask

    def keep(self: LocalAgent, operation: str, *given: Any, **arguments: Any) -> Answer:
        asked.append((operation, arguments))
        return ask(self, operation, *given, **arguments)

    starts.status = {"state": "SUCCEEDED", "exit_code": 0, "control": CONTROL}
    handle = backend.submit(*prepare(num_nodes=2))
    monkeypatch.setattr(LocalAgent, "ask", keep)
    assert backend.status(handle).state is State.SUCCEEDED
    asked.clear()
    backend.cancel(handle)
    changes = [each for each in asked if each[0] != "report"]
    assert changes == [("reap", {"node": f"{handle}/node-{rank}"}) for rank in (0, 1)]


def test_the_runtime_is_compiled_once_and_checked_against_its_source(tmp_path):
    def make(name: str, text: str) -> Path:
        runtime = tmp_path / name / ".cloudtrain"
        (runtime / "node").mkdir(parents=True)
        (runtime / "launch.py").write_text("import node.part\n")
        (runtime / "node" / "part.py").write_text(text)
        (runtime / "node" / "data.txt").write_text("no module")
        return runtime

    runtime, cache = make("one", "VALUE = 1\n"), tmp_path / "cache"
    local.link_bytecode(runtime.parent, cache)
    (place,) = cache.iterdir()
    assert place.name.startswith(f"{sys.implementation.cache_tag}-") and len(place.name.rpartition("-")[2]) == 32
    for file in (runtime / "launch.py", runtime / "node" / "part.py"):
        linked = file.parent / "__pycache__"
        assert linked.is_symlink()
        data = (linked / f"{file.stem}.{sys.implementation.cache_tag}.pyc").read_bytes()
        assert data[:16] == MAGIC_NUMBER + b"\3\0\0\0" + source_hash(file.read_bytes())
    made = {path: path.stat().st_mtime_ns for path in place.rglob("*.pyc")}
    assert len(made) == 2
    local.link_bytecode(make("same", "VALUE = 1\n").parent, cache)
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*.pyc")} == made and len(list(cache.iterdir())) == 1
    local.link_bytecode(make("another", "VALUE = 2\n").parent, cache)
    assert len(list(cache.iterdir())) == 2
    broken = make("broken", "VALUE =\n")
    local.link_bytecode(broken.parent, cache)
    assert len(list(cache.iterdir())) == 2, "nothing is left of it"
    assert not (broken / "__pycache__").exists(), "the job runs without it, and says what is wrong"


def test_a_job_of_this_interpreter_gets_the_bytecode_and_one_of_another_does_not(home, starts, tmp_path, monkeypatch):
    linked: list[tuple[Path, Path]] = []
    monkeypatch.setattr("cloudtrain.backends.local.backend.link_bytecode", lambda *given: linked.append(given[:2]))
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print(1)\n")
    job, bundle = Job.from_dict({"source": str(source), "entrypoint": "train.py"}), Bundle.make(source, tmp_path / "b")
    for python in ("", PYTHON):
        backend = LocalBackend({"python": python} if python else {}, home / "runs")
        backend.submit(backend.plan(job, bundle, f"r{len(python)}"), bundle)
    assert linked == [(home / "runs" / "r0" / "a1" / "node-0" / "source", bundle.path.parent / ".bytecode")]
