"""What the output holds at every moment: whole checkpoints, the newest of them soon, and an alarm where that fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from launcher.errors import Refused
from launcher.log import Log
from launcher.manifest import decode
from launcher.output.age import CheckpointAge
from launcher.output.keep import Keeper
from launcher.output.store import Failed
from launcher.output.sync import Sync
from launcher.prepare.node import open_output
from launcher.reports import Reports
from launcher.world.cluster import resolve

from cloudtrain.backends.manifest import Manifest
from cloudtrain.testing.clock import VirtualClock
from tests.conftest import wait_for
from tests.entrypoints.launching import Attempt
from tests.stores import S3, running

from trainer.checkpoints import files  # isort: skip

PLACE = "home/run/checkpoints/"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with running(S3) as started:
        for name, value in started.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CLOUDTRAIN_SYNC_EVERY_S", "0.01")
        yield started


def sync_of(folder: Path, attempt: int = 1, node: int = 0, **job) -> Sync:
    """Return the sync of a node with the run's folders below `folder`; its log is <folder>/log."""
    folders = {name: str(folder / name) for name in ("checkpoints", "outputs", "model", "kept")}
    for path in folders.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    usual = {"argv": ("train.py",), "nodes": 1, "processes_per_node": 1, "output": "s3://bucket/home"}
    manifest = Manifest(run_id="run", attempt=attempt, **{**usual, **job})
    own = decode(manifest.encode())
    own.take_role(node)
    return Sync(own, folders, Log.in_folder(str(folder)))


def write_parts(disks: list[Path], step: int) -> None:
    """Write a checkpoint whose parts are on two disks, as two nodes without a common folder do; node 0 commits."""
    paths = [files.folder_of(disk / "checkpoints", step, 1) for disk in disks]
    for node, path in enumerate(paths):
        files.begin(path)
        (path / f"part-{node}").write_bytes(b"%d" % step * (100 + node))
    elsewhere = {name: {**at, "node": 1} for name, at in files.settle(paths[1]).items()}
    files.commit(paths[0], elsewhere, step=step)


def test_parts_of_two_nodes_are_complete_when_both_have_come(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disks = [tmp_path / "0", tmp_path / "1"]
    first, second = (sync_of(disk, argv=(".cloudtrain/train.py",), nodes=2) for disk in disks)
    first.open(0)
    second.open(1)

    def keys(*steps: int) -> set[str]:
        return {f"{PLACE}step-{step:08d}.a1/{name}" for step in steps for name in ("part-0", "part-1", "COMPLETE")}

    def stored() -> set[str]:
        return {key for key in s3.objects() if key.startswith(f"{PLACE}step-")}

    write_parts(disks, 1)
    assert first._turn(False) == "" and stored() == keys(1) - {
        f"{PLACE}step-00000001.a1/{n}" for n in ("part-1", "COMPLETE")
    }
    assert second._turn(False) == "" == first._turn(False)
    assert stored() == keys(1)
    write_parts(disks, 2)
    for disk in disks:
        files.discard(files.folder_of(disk / "checkpoints", 1, 1))
    assert second._turn(False) == "" and keys(1) <= stored(), "node 0 alone removes a checkpoint"
    assert first._turn(False) == "" and stored() == keys(2)
    write_parts(disks, 3)
    monkeypatch.setattr("launcher.output.sync.PARTS_S", 0.0)
    first.start()
    assert "parts from other nodes are missing" in first.finish(lambda: False, True)
    second.start()
    assert second.finish(lambda: False, True) == ""
    assert first._last(True) == "" and stored() == keys(2, 3)
    again = sync_of(tmp_path / "new", 2, argv=(".cloudtrain/train.py",), nodes=2)
    again.open(1)
    newest = files.newest(tmp_path / "new" / "checkpoints", print)
    assert newest is not None and newest.step == 3, "every node has all parts before it resumes"


def said(folder: Path) -> list[str]:
    lines = (folder / "log").read_text().splitlines(keepends=True)
    return [line.rstrip("\n").split(" ", 3)[3] for line in lines if line.endswith("\n")]


def arrived(folder: Path, step: int) -> None:
    """Wait until the sync has said that the checkpoint of a step is in the store."""
    word = f'"stored":"checkpoints/step-{step:08d}.a1"'
    wait_for(lambda: any(word in text for text in said(folder)), f"step {step} in the store")


def write(folder: Path, step: int, attempt: int = 1) -> Path:
    path = files.folder_of(folder / "checkpoints", step, attempt)
    files.begin(path)
    (path / "state").mkdir()
    for number in range(4):
        (path / "state" / str(number)).write_bytes(b"%d" % step * (100 + number))
    files.commit(path, step=step)
    return path


def whole(keys: set[str]) -> list[int]:
    """Return the steps of which a store with these keys has everything; fails for a mark without what it speaks of."""
    found = []
    for mark in sorted(key for key in keys if key.endswith("/COMPLETE")):
        folder = mark.removesuffix("COMPLETE")
        assert {f"{folder}state/{number}" for number in range(4)} <= keys, f"{mark} over half of it"
        found.append(int(folder.removeprefix(f"{PLACE}step-")[:8]))
    return found


def test_whenever_the_uploader_dies_the_store_has_a_whole_one(s3: S3, tmp_path: Path):
    """Every prefix of what reaches the store is a point at which the node may be gone: once there is a whole checkpoint
    there always is one, it never gets older, and no COMPLETE stands over half of one."""
    sync = sync_of(tmp_path)
    sync.open(0)
    sync.start()
    for step in range(1, 13):
        write(tmp_path, step)
        files.prune(tmp_path / "checkpoints", 2)
        if step % 3 == 0:  # the trainer is faster than the uploader most of the time, not always
            arrived(tmp_path, step)
    assert sync.finish(lambda: False, True) == ""
    keys: set[str] = set()
    newest = 0
    for verb, key in list(s3.changes):
        (keys.add if verb == "PUT" else keys.discard)(key)
        steps = whole(keys)
        assert max(steps, default=0) >= newest, f"{verb} {key}"
        newest = max(steps, default=0)
    assert whole(keys) == [11, 12] == whole(set(s3.objects()))
    assert not [key for key in keys if key.startswith(PLACE) and "step-00000011" not in key and "-00000012" not in key]


def test_a_restart_is_a_start_of_its_own_unless_a_later_attempt_has_begun(s3: S3, tmp_path: Path):
    sync = sync_of(tmp_path / "one")
    sync.open(0)
    sync.claim_next()
    assert sync.epoch == 2 and "home/run/epochs/00000002.json" in s3.objects()
    assert not sync._look_for_later()
    later = sync_of(tmp_path / "two", attempt=2)
    later.open(0)
    assert later.epoch == 3
    with pytest.raises(Refused, match="a later start of this run writes to s3://bucket/home/run"):
        sync.claim_next()


def test_a_restart_whose_epoch_cannot_be_claimed_says_so(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sync = sync_of(tmp_path)
    sync.open(0)
    monkeypatch.setattr(sync._store, "create", lambda *_: (_ for _ in ()).throw(Failed("no network")))
    sync.claim_next()
    assert sync.epoch == 1 and "could not be recorded in the output: no network" in (tmp_path / "log").read_text()


def test_one_that_is_removed_here_stays_until_its_successor_is_there(s3: S3, tmp_path: Path):
    sync = sync_of(tmp_path)
    sync.open(0)
    sync.start()
    write(tmp_path, 1)
    arrived(tmp_path, 1)
    s3.refuse = f"{PLACE}step-00000002.a1/state/3"
    write(tmp_path, 2)
    files.prune(tmp_path / "checkpoints", 1)
    assert [found.step for found in files.find(tmp_path / "checkpoints")] == [2]
    tried = len(s3.changes)
    wait_for(lambda: len([key for _, key in list(s3.changes)[tried:] if key == s3.refuse]) >= 3, "three tries")
    assert whole(set(s3.objects())) == [1], "the old one is all that would outlive this node"
    begin = '::cloudtrain::{"kind":"alarm"'
    wait_for(lambda: any(text.startswith(begin) for text in said(tmp_path)), "an alarm")
    alarms = [json.loads(text[14:]) for text in said(tmp_path) if text.startswith(begin)]
    assert len(alarms) == 1 and "uploading to the output failed: s3://bucket/home/run: " in alarms[0]["reason"]
    assert alarms[0]["reason"].endswith("(the file checkpoints/step-00000002.a1/state/3)")
    s3.refuse = ""
    arrived(tmp_path, 2)
    wait_for(lambda: "output: uploading to the output works again" in said(tmp_path), "the word")
    assert sync.finish(lambda: False, False) == ""
    assert whole(set(s3.objects())) == [2]


def test_a_run_that_failed_without_a_checkpoint_of_its_own_leaves_the_last_one(s3: S3, tmp_path: Path):
    sync = sync_of(tmp_path)
    sync.open(0)
    sync.start()
    path = write(tmp_path, 1)
    arrived(tmp_path, 1)
    files.discard(path)
    assert sync.finish(lambda: False, False) == ""
    assert whole(set(s3.objects())) == [1]


def test_a_mark_that_names_what_is_not_there_is_not_uploaded(s3: S3, tmp_path: Path):
    write(tmp_path, 1)
    (write(tmp_path, 2) / "state" / "2").unlink()
    (write(tmp_path, 3) / "state" / "3").write_bytes(b"shorter")
    sync = sync_of(tmp_path)
    sync.open(0)
    sync.start()
    assert sync.finish(lambda: False, True) == ""
    keys = set(s3.objects())
    assert [key for key in keys if key.endswith("COMPLETE")] == [f"{PLACE}step-00000001.a1/COMPLETE"]
    assert f"{PLACE}step-00000003.a1/state/3" in keys
    words = [text for text in said(tmp_path) if "is not uploaded" in text]
    assert sorted(words) == [
        f"output: checkpoints/step-0000000{step}.a1/COMPLETE is not uploaded yet: "
        f"the size of state/{step} differs from the one in its list of files"
        for step in (2, 3)
    ]


# -- how old the newest one is ----------------------------------------------------------------------------------------


class Told:
    """CheckpointAge over a clock that stands until it is moved."""

    def __init__(self, interval_s: float | None, expected: bool) -> None:
        self.clock, self.heard = VirtualClock(), []
        self.fresh = CheckpointAge(
            interval_s, expected, lambda kind, **data: self.heard.append((kind, data)), self.clock
        )

    def after(self, seconds: float) -> list[str]:
        """Let time pass and return the alarms of the moment."""
        self.clock.sleep(seconds)
        before = len(self.heard)
        self.fresh.look()
        return [data["reason"] for kind, data in self.heard[before:] if kind == "alarm"]


def test_an_alarm_at_twice_the_interval_and_again():
    told = Told(60, expected=True)
    told.fresh.begin(False)
    assert told.after(119) == []
    [alarm] = told.after(2)
    assert alarm == (
        "the newest checkpoint in the output is 121 s old, more than twice the expected interval: "
        "no checkpoint has been written since"
    )
    assert told.after(60) == [] and told.fresh.age_s == 181
    told.fresh.doing("the upload")
    assert told.after(61)[0].endswith("interval: the upload has taken 61 s so far")
    told.fresh.doing("")
    told.fresh.went("no route to host")
    assert told.after(120)[0].endswith("interval: no route to host")
    told.fresh.written("checkpoints/a/COMPLETE")
    told.clock.sleep(5)
    told.fresh.arrived("checkpoints/a/COMPLETE")
    assert told.heard[-1] == ("checkpoint", {"stored": "checkpoints/a", "seconds": 5.0})
    assert told.fresh.age_s == 5 and told.after(100) == [] and len(told.after(20)) == 1


def test_what_writes_no_checkpoints_is_not_asked_for_any():
    told = Told(60, expected=False)
    told.fresh.begin(False)
    assert told.after(1000) == [] and told.fresh.age_s is None
    told.fresh.written("checkpoints/a/COMPLETE")
    assert told.after(119) == [] and len(told.after(2)) == 1


def test_an_interval_in_steps_is_learnt():
    told = Told(None, expected=True)
    told.fresh.begin(True)
    assert told.after(1799) == []
    for mark in "abc":
        told.fresh.written(mark)
        told.fresh.arrived(mark)
        told.clock.sleep(30)
    assert told.after(29) == [] and len(told.after(2)) == 1


FROZEN = """
import os, pathlib, time
step = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]) / "step-1"
while not (step.parent / "go").exists():
    time.sleep(0.02)
step.mkdir()
(step / "weights").write_text("one")
(step / "COMPLETE").write_text("1")
while not (step.parent / "end").exists():
    time.sleep(0.02)
"""


def test_an_uploader_that_hangs_is_told_while_it_hangs(s3: S3, tmp_path: Path):
    environ = s3.environ | {"CLOUDTRAIN_SYNC_EVERY_S": "0.05"}
    with Attempt(
        tmp_path, FROZEN, output="s3://bucket/home", checkpoint={"every_s": 0.5, "keep": 3}, environ=environ
    ) as attempt:
        attempt.start()
        wait_for(lambda: any("attempts/" in key for _, key in list(s3.changes)), "the start")
        s3.hold.clear()
        folder = tmp_path / "run" / "checkpoints"
        (folder / "go").touch()
        wait_for(lambda: attempt.events("alarm"), "an alarm")
        reason = attempt.events("alarm")[0]["reason"]
        assert "the upload has taken " in reason
        s3.hold.set()
        wait_for(lambda: attempt.events("checkpoint"), "its arrival")
        assert attempt.events("checkpoint")[0]["stored"] == "checkpoints/step-1"
        (folder / "end").touch()
        assert attempt.wait() == [0]
    assert s3.objects()[f"{PLACE}step-1/COMPLETE"] == b"1"


def test_kept_files_come_back_from_the_store(s3: S3, tmp_path: Path):
    """A node of another machine gets its own kept files, and no other outputs."""
    first = sync_of(tmp_path / "a")
    first.open(0)
    first.start()
    for name in ("out/x", "node-1/out/x", "events"):
        path = tmp_path / "a" / "outputs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert first.finish(lambda: False, True) == ""
    again = sync_of(tmp_path / "b", 2)
    keeper = Keeper(
        ["out"], str(tmp_path / "b"), str(tmp_path / "b" / "outputs"), 1, Log.in_folder(str(tmp_path / "b"))
    )
    again._keeper = keeper
    again.open(1)
    outputs = tmp_path / "b" / "outputs"
    assert [path for path in outputs.rglob("*") if path.is_file()] == [outputs / "node-1/out/x"]
    assert keeper.restore() == 1 and (tmp_path / "b" / "out" / "x").read_text() == "node-1/out/x"


def kept_sync(folder: Path, attempt: int = 1) -> Sync:
    sync = sync_of(folder, attempt)
    sync._keeper = Keeper(["out"], str(folder), str(folder / "outputs"), 0, Log.in_folder(str(folder)))
    sync.open(0)
    return sync


def stored(s3: S3) -> set[str]:
    return {key.removeprefix("home/run/outputs/") for key in s3.objects() if key.startswith("home/run/outputs/")}


def test_what_the_script_removes_from_a_kept_folder_goes_from_the_store(s3: S3, tmp_path: Path):
    out = tmp_path / "outputs" / "out"
    (out / "a").mkdir(parents=True)
    sync = kept_sync(tmp_path)
    for path in (out / "x", out / "a" / "y", out.parent / "events"):
        path.write_text("1")
    assert sync._upload(False) == "" and stored(s3) == {"out/x", "out/a/y", "events"}
    (out / "a" / "y").rename(out / "z")  # a pass that finds neither name is possible: one alone removes nothing
    (out / "x").unlink()
    (out.parent / "events").unlink()
    s3.refuse = "home/run/outputs/out/z"
    assert sync._upload(False) and sync._upload(False) and stored(s3) == {"out/x", "out/a/y", "events"}
    s3.refuse = ""
    before = len(s3.changes)
    assert sync._upload(False) == "" and stored(s3) == {"out/z", "events"}, "what is not kept stays"
    first, *removed = s3.changes[before:]
    assert first == ("PUT", "home/run/outputs/out/z") and {verb for verb, _ in removed} == {"DELETE"}
    (out / "z").unlink()
    assert sync._upload(False) == "" and stored(s3) == {"out/z", "events"}
    assert sync._last(False) == "" and stored(s3) == {"events"}, "at the end nothing moves any more"


def test_the_next_attempt_finds_what_was_left_in_each_folder_and_deletes_what_the_script_deletes(
    s3: S3, tmp_path: Path
):
    def auto(folder: Path, attempt: int) -> tuple[Sync, Keeper]:
        sync = sync_of(folder, attempt)
        (folder / "source" / ".cloudtrain").mkdir(parents=True)
        log = Log.in_folder(str(folder))
        outputs, kept = str(folder / "outputs"), str(folder / "kept")
        keeper = Keeper(None, str(folder / "source"), outputs, 0, log, records=kept)
        sync._keeper = keeper
        sync.open(0)
        return sync, keeper

    first, keeper = auto(tmp_path / "a", 1)
    keeper.begin()
    for name in ("outputs/own.json", "model/weights", "checkpoints/x.pt", "source/out/a.pt", "source/out/b.pt"):
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_text(name)
    assert keeper.finish() == "" and first._last(False) == ""
    again, keeper = auto(tmp_path / "b", 2)
    assert keeper.restore() == 2 and keeper.has_restored
    assert {str(path.relative_to(tmp_path / "b" / "source")) for path in (tmp_path / "b" / "source").rglob("*.*t*")} == {
        ".cloudtrain", "out/a.pt", "out/b.pt",
    }  # fmt: skip
    for name in ("outputs/own.json", "model/weights", "checkpoints/x.pt"):
        assert (tmp_path / "b" / name).read_text() == name
    keeper.begin()
    (tmp_path / "b" / "source" / "out" / "a.pt").unlink()
    assert keeper.finish() == "" and again._last(False) == "" and stored(s3) == {"own.json", "out/b.pt"}


def test_a_later_start_removes_what_an_earlier_one_brought_there(s3: S3, tmp_path: Path):
    (tmp_path / "outputs" / "out").mkdir(parents=True)
    (tmp_path / "outputs" / "out" / "x").write_text("1")
    assert kept_sync(tmp_path)._last(False) == ""
    later = kept_sync(tmp_path, 2)  # on the same disk: nothing is brought back
    (tmp_path / "outputs" / "out" / "x").unlink()
    assert later._last(False) == "" and stored(s3) == set()


def test_an_attempt_that_has_begun_on_sagemaker_ends_the_uploads_of_an_older_one(s3: S3, tmp_path: Path):
    """SageMaker itself copies what its launcher writes; an older node may be alive, and then changes nothing any more."""
    sync = sync_of(tmp_path, 2)
    sync.open(0)
    write(tmp_path, 10)
    s3.put(f"{PLACE}.cloudtrain/history/run-a1/20260101T000000.000000Z-0/run.json", b"{}")
    assert sync._upload(False) == "" and whole(set(s3.objects())) == [10]
    s3.put(f"{PLACE}.cloudtrain/history/run-a3/20260101T000000.000000Z-0/run.json", b"{}")
    write(tmp_path, 20)
    assert "attempt 3 of this run has started on SageMaker" in sync._upload(False)
    assert whole(set(s3.objects())) == [10] and s3.changes == []


def test_a_history_that_sagemaker_copied_is_not_brought_back(s3: S3, tmp_path: Path):
    s3.put(f"{PLACE}.cloudtrain/logs/run-a1/node-0/1/00000000", b"1")
    s3.put(f"{PLACE}checkpoint_dir/5.txt", b"5")
    sync_of(tmp_path, 2).open(0)
    found = [str(path.relative_to(tmp_path)) for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    assert found == ["checkpoints/checkpoint_dir/5.txt"]


def test_a_service_node_brings_nothing_back(s3: S3, tmp_path: Path):
    for name in ("checkpoints/5.pt", "outputs/out/5.pt", "model/model.pt"):
        s3.put(f"home/run/{name}", b"5")
    role = {"processes_per_node": 1, "rank_env": False, "env": {}, "setup": "", "argv": ["serve.py"], "form": "script"}
    roles = [{"name": "trainer", "nodes": 1}, {"name": "server", "nodes": 1, "secrets": [], **role}]
    for node in (0, 1):
        sync = sync_of(tmp_path / str(node), 2, nodes=2, roles=roles, node=node)
        sync._keeper = Keeper(None, str(tmp_path / "source"), str(tmp_path / str(node) / "outputs"), node, sync._log)
        sync.open(node)
    found = [[path.name for path in sorted((tmp_path / node).rglob("*.pt"))] for node in "01"]
    assert found == [["5.pt", "model.pt", "5.pt"], []]
    assert {f"home/run/attempts/run-a2-node-{node}.json" for node in (0, 1)} <= s3.objects().keys()


def reports(folder: Path) -> list[str]:
    """Return which checkpoints a node has reported."""
    events = [json.loads(text.removeprefix("::cloudtrain::")) for text in said(folder) if text.startswith("::")]
    return [event.get("kept") or event.get("written") for event in events if event["kind"] == "checkpoint"]


CHECKPOINT = ("model.safetensors", "optimizer.pt", "trainer_state.json")


@pytest.mark.parametrize("patterns", [None, ["out"]])
@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("source/out/checkpoint-4", "out/checkpoint-4"),
        ("run/model/checkpoint-4", "{model_dir}/checkpoint-4"),
        ("run/outputs/a/checkpoint-4", "{output_dir}/a/checkpoint-4"),
        ("run/checkpoints/checkpoint-4", "checkpoint-4"),
    ],
)
def test_a_scripts_checkpoint_is_reported_when_the_store_has_all_of_it(
    s3: S3, tmp_path: Path, place: str, shown: str, patterns: list[str] | None
):
    folders = {name: str(tmp_path / "run" / name) for name in ("checkpoints", "outputs", "model", "kept")}
    for folder in (*folders.values(), tmp_path / "source" / ".cloudtrain"):
        Path(folder).mkdir(parents=True)
    usual = {"argv": ("train.py",), "nodes": 1, "processes_per_node": 1, "output": "s3://bucket/home"}
    manifest = decode(Manifest(run_id="run", attempt=1, **usual).encode())
    log = Log.in_folder(str(tmp_path))
    keeper = Keeper(
        patterns, str(tmp_path / "source"), folders["outputs"], 0, log, records="" if patterns else folders["kept"]
    )
    sync = open_output(manifest, resolve({}, {}), {}, folders, log, keeper)
    node = Reports(SimpleNamespace(clock=log.clock), log, manifest, {})
    node.begin(SimpleNamespace(keeper=keeper, folders=folders), resolve({}, {}))
    keeper._began_ns = 1
    early: list[str] = []
    put = sync._store.put
    sync._store.put = lambda path, name: (early.extend(reports(tmp_path)), put(path, name))

    def turn() -> str:
        keeper._look()
        keeper._look()  # a file is whole when it rests
        node.new_checkpoints()
        return sync._turn(False)

    for name in CHECKPOINT:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / name).write_text(name)
    top = "outputs/" if place.startswith("source/") else ""
    stored_at = f"home/run/{top}{place.partition('/')[2]}"
    s3.refuse = f"{stored_at}/optimizer.pt"
    assert "Access Denied" in turn() and reports(tmp_path) == []
    s3.refuse = ""
    assert turn() == "" and reports(tmp_path) == [shown] and early == []
    assert {f"{stored_at}/{name}" for name in CHECKPOINT} <= s3.objects().keys()
    assert turn() == "" and reports(tmp_path) == [shown], "once"


def test_a_checkpoint_that_the_script_removes_before_it_is_stored_is_not_reported(s3: S3, tmp_path: Path):
    sync = sync_of(tmp_path)
    unit = tmp_path / "model" / "checkpoint-4"
    unit.mkdir()
    for name in CHECKPOINT:
        (unit / name).write_text(name)
    sync.report(str(unit), kept="{model_dir}/checkpoint-4")
    s3.refuse = "home/run/model/checkpoint-4/optimizer.pt"
    assert sync._turn(False) != ""
    shutil.rmtree(unit)
    s3.refuse = ""
    assert sync._turn(False) == "" and sync._turn(False) == "" and reports(tmp_path) == []
