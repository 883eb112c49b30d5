"""What the backend local does where another submit was faster, files are damaged, or a call is for what is not there."""

from __future__ import annotations

import marshal
import os
import py_compile
import shutil
import sys
from contextlib import nullcontext
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.local import backend as local
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.cli.view import summary
from cloudtrain.errors import BackendError, BadJob, StoreError
from cloudtrain.job.job import Job
from cloudtrain.nodes import supervisor
from cloudtrain.nodes.agents import Answer, LocalAgent
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.runs.submit import Submitter
from cloudtrain.source import node_code
from cloudtrain.source.bundle import Bundle
from tests.backends.local.test_folders import PYTHON, backend, prepare, starts

__all__ = ["backend", "prepare", "starts"]  # fixtures


@pytest.mark.parametrize("faster", [True, False])
def test_a_source_that_another_submit_has_unpacked_meanwhile_is_used(backend, prepare, starts, monkeypatch, faster):
    def extract(self: Bundle, into: Path) -> None:
        if faster:
            into.mkdir(parents=True)
        raise StoreError("the folder is there")

    monkeypatch.setattr(Bundle, "extract", extract)
    plan, bundle = prepare()
    if faster:
        assert backend.submit(plan, bundle) and len(starts.given) == 1
    else:
        with pytest.raises(StoreError, match="the folder is there"):
            backend.submit(plan, bundle)
        assert not starts.given


@pytest.mark.parametrize("text", ["{", "[" * 100_000, None])
def test_an_attempt_without_a_request_that_can_be_read_is_not_found(backend, prepare, text: str | None):
    plan, bundle = prepare()
    handle = backend.submit(plan, bundle)
    assert backend.find(plan.attempt_id) == handle
    request = Path(handle) / "request.json"
    request.unlink()
    if text is not None:
        request.write_text(text)
    assert backend.find(plan.attempt_id) is None and backend.nodes(handle) == []


def test_an_attempt_has_begun_where_all_its_nodes_have(backend, prepare, monkeypatch):
    plan, bundle = prepare(num_nodes=2)
    handle = backend.submit(plan, bundle)
    begun = {"node-0"}
    monkeypatch.setattr(supervisor, "has_begun", lambda node: node.name in begun)
    assert backend.find(plan.attempt_id) is None
    begun.add("node-1")
    assert backend.find(plan.attempt_id) == handle


def test_a_program_beside_a_rank_is_one_of_the_jobs_python(backend, prepare):
    handle = backend.submit(*prepare(num_nodes=2))
    shell = backend.shell(handle, 1, ["-c", "print(1)", "a b"], stdin=False, terminal=False)
    assert shell.argv == (PYTHON, "-c", "print(1)", "a b")
    with pytest.raises(BackendError, match="there is no node 2: they are counted from 0, and the last is 1"):
        backend.shell(handle, 2, [], stdin=False, terminal=False)


def test_all_problems_of_a_job_come_at_once(backend, prepare, tmp_path):
    _, bundle = prepare()
    service = {"run": "serve", "ports": [8000]}
    job = Job.from_dict(
        {
            "name": "r",
            "source": str(tmp_path / "source"),
            "inputs": {"data": {"uri": "https://example.org/x", "mode": "copy"}},
            "roles": {"trainer": {"entrypoint": "train.py"}, "one": service, "other": service},
        }
    )
    with pytest.raises(BadJob) as caught:
        backend.plan(job, bundle, "r")
    assert [problem.path for problem in caught.value.problems] == ["roles.other.ports", "inputs.data.uri"]


def test_the_launcher_ends_a_job_at_its_limit(backend, prepare):
    plan, _ = prepare(limits={"max_runtime": "1h", "grace": "30s"})
    assert backend.time_limit(plan).seconds == 3630


def test_an_attempt_that_is_discarded_is_ended_on_each_node(backend, prepare, monkeypatch):
    plan, bundle = prepare(num_nodes=2)
    handle = backend.submit(plan, bundle)
    asked: list[tuple[str, str]] = []
    ask = LocalAgent.ask

    def keep(self: LocalAgent, operation: str, *given: Any, **arguments: Any) -> Answer:
        if operation == "report":
            return ask(self, operation, *given, **arguments)
        asked.append((operation, str(arguments.get("node") or f"{arguments['folder']}/node-{arguments['rank']}")))
        return Answer(None)

    monkeypatch.setattr(LocalAgent, "ask", keep)
    backend.discard(plan.attempt_id)
    nodes = [f"{handle}/node-0", f"{handle}/node-1"]
    assert sorted(asked[2:]) == [("end", node) for node in nodes]
    assert [operation for operation, _ in asked[:2]] != ["end", "end"] and sorted(
        node for _, node in asked[:2]
    ) == nodes


def test_a_copied_home_reads_the_attempts_of_the_original_where_they_are(backend, prepare, home, tmp_path):
    handle = backend.submit(*prepare())
    shutil.copytree(home, tmp_path / "copy")
    copy = LocalBackend({"python": PYTHON}, tmp_path / "copy" / "runs")
    assert [node.attempt for node in copy.nodes(handle)] == [handle], "there it runs, and is watched"
    assert copy.status(handle).state is backend.status(handle).state
    shutil.rmtree(home / "runs")
    assert [node.attempt for node in copy.nodes(handle)] == [str(tmp_path / "copy" / "runs" / "r" / "a1")]
    shutil.rmtree(tmp_path / "copy" / "runs")
    assert copy.nodes(handle) == [] and handle in copy.status(handle).reason


@pytest.mark.parametrize(
    ("resources", "seen"),
    [({}, ["all", "all"]), ({"accelerators": "0"}, ["", ""]), ({"accelerators": "A100:2"}, ["0,1", "2,3"])],
)
def test_nodes_on_one_machine_share_its_gpus_out(prepare, resources: dict[str, str], seen: list[str]):
    plan, _ = prepare(num_nodes=2, resources=resources)
    assert [node["env"]["CLOUDTRAIN_GPUS"] for node in plan.request["nodes"]] == seen


@pytest.mark.parametrize(("asked", "refused"), [(None, False), ("0", False), ("A100:2", False), ("A100:3", True)])
def test_more_gpus_than_this_machine_shows_are_refused(backend, prepare, monkeypatch, asked: str | None, refused: bool):
    monkeypatch.setattr(node_code.module("launcher.prepare.gpus"), "visible", lambda: ["0", "1", "2", "3"])
    plan, _ = prepare(num_nodes=2, resources={"accelerators": asked} if asked else {})
    said = "is A100:3, 6 GPUs in all, and this machine shows 4 GPUs"
    with pytest.raises(BadJob, match=said) if refused else nullcontext():
        backend.preflight(plan)


def test_a_person_is_shown_where_the_files_of_a_run_are_and_may_copy_those_beside_the_script(
    starts, home, tmp_path, capsys
):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print(1)\n")
    given = {"name": "r", "source": str(tmp_path / "source"), "entrypoint": "train.py"}
    run = Submitter("local", watch=False, python=PYTHON).submit(given)
    summary.print_submitted(run, "started on")
    assert f"folder {home / 'runs' / run.run_id}" in " ".join(capsys.readouterr().out.split())
    (command,) = summary.workdir_command(run)
    assert command.startswith(f"cloudtrain fetch {run.run_id} --what workdir ")
    copied = run.fetch(tmp_path / "into", ("workdir",)) / "workdir" / "node-0"
    assert [path.name for path in copied.iterdir()] == ["train.py"]


ROLES = {"trainer": {"entrypoint": "train.py"}, "server": {"run": "serve", "resources": {"cpus": 2}}}


@pytest.mark.parametrize(
    "keys",
    [
        {"num_nodes": 2},
        {"num_nodes": 2, "min_nodes": 1},
        {"resources": {"accelerators": "A100:1"}},
        {"secrets": {"TOKEN": "env:TOKEN"}},
        {"secrets": {"TOKEN": "file:/run/token"}},
        {"roles": ROLES, "entrypoint": None},
    ],
    ids=str,
)
def test_what_this_machine_carries_out_is_planned(home, tmp_path, keys: dict[str, Any]):
    (tmp_path / "train.py").write_text("print(1)\n")
    given = {"source": str(tmp_path), "entrypoint": "train.py", **keys}
    plan = Planner("local").plan(Job.from_dict({name: value for name, value in given.items() if value}))
    assert not [note for note in plan.notes if any(key in note and "without effect" in note for key in keys)]


# -- bytecode ---------------------------------------------------------------------------------------------------------


def make_runtime(folder: Path) -> list[Path]:
    """Write the runtime of a source; return its modules."""
    (folder / ".cloudtrain" / "node").mkdir(parents=True)
    modules = [folder / ".cloudtrain" / "node" / name for name in ("one.py", "two.py")]
    for module in modules:
        module.write_text(f"VALUE = {module.stem!r}\n")
    return modules


def check_bytecode(module: Path) -> bytes:
    """Return the bytecode that is lent to a module: it is checked against its source, and of the same text."""
    data = (module.parent / "__pycache__" / f"{module.stem}.{sys.implementation.cache_tag}.pyc").read_bytes()
    assert data[:16] == MAGIC_NUMBER + b"\3\0\0\0" + source_hash(module.read_bytes())
    names: dict[str, Any] = {}
    exec(marshal.loads(data[16:]), names)
    assert names["VALUE"] == module.stem
    return data[16:]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the modules that are compiled from now on."""
    found: list[str] = []
    compile_file = py_compile.compile

    def keep(file: str, *given: Any, **named: Any) -> str | None:
        found.append(Path(file).name)
        return compile_file(file, *given, **named)

    monkeypatch.setattr(py_compile, "compile", keep)
    return found


@pytest.mark.parametrize("changed", ["", "text", "time", "size", "version", "gone"])
def test_bytecode_of_the_installation_is_taken_over_where_it_is_of_the_same_text(
    tmp_path, compiled, monkeypatch, changed: str
):
    modules, installed = make_runtime(tmp_path / "source"), make_runtime(tmp_path / "installed")
    names = [f".cloudtrain/node/{module.name}" for module in installed]
    monkeypatch.setattr(local, "runtime_files", lambda: zip(names, installed, strict=True))
    made = [
        Path(str(py_compile.compile(str(module), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)))
        for module in installed
    ]
    bodies = [path.read_bytes()[16:] for path in made]
    for module, bytecode in zip(installed, made, strict=True):
        data = bytecode.read_bytes()
        if changed == "text":
            module.write_text("VALUE = 'other'\n")
        elif changed == "time":
            os.utime(module, (1, 1))
        elif changed == "size":
            bytecode.write_bytes(data[:12] + b"\1\0\0\0" + data[16:])
        elif changed == "version":
            bytecode.write_bytes(b"\0" + data[1:])
        elif changed == "gone":
            bytecode.unlink()
    compiled.clear()
    local.link_bytecode(tmp_path / "source", tmp_path / "cache")
    lent = [check_bytecode(module) for module in modules]
    assert compiled == (["one.py", "two.py"] if changed else []) and (changed or lent == bodies)


@pytest.mark.parametrize("faster", [True, False])
def test_a_cache_that_another_submit_has_made_meanwhile_is_used(tmp_path, monkeypatch, faster: bool):
    """Where nobody has, and the disk is full, the job runs without one."""
    modules, compile_file = make_runtime(tmp_path / "source"), py_compile.compile
    monkeypatch.setattr(local, "runtime_files", lambda: [])

    def compile_slowly(file: str, target: str, **named: Any) -> None:
        if not faster and file.endswith("two.py"):
            raise OSError(28, "No space left on device")
        compile_file(file, target, **named)
        partial = next(folder for folder in Path(target).parents if folder.suffix == ".tmp")
        if faster:
            shutil.copytree(partial, partial.with_name(partial.name.partition(".")[0]), dirs_exist_ok=True)

    monkeypatch.setattr(py_compile, "compile", compile_slowly)
    local.link_bytecode(tmp_path / "source", tmp_path / "cache")
    if faster:
        assert [check_bytecode(module) for module in modules]
    assert os.path.lexists(modules[0].parent / "__pycache__") is faster
    assert len([*(tmp_path / "cache").iterdir()]) == faster, "nothing partial is left"
