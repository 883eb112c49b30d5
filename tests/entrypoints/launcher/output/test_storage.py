"""Inputs and output in object stores, through the real launcher, the real clients and servers on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher.errors import Refused
from launcher.output.store import check_names

from tests.conftest import wait_for
from tests.entrypoints.launching import Attempt
from tests.stores import AZ, GCS, S3, running

READ = """
import os, pathlib
top = pathlib.Path(os.environ["CLOUDTRAIN_INPUT_TRAIN"])
for path in [top] if top.is_file() else sorted(item for item in top.rglob("*") if item.is_file()):
    print(path.relative_to(top) if path != top else path.name, path.read_bytes().decode())
"""


@pytest.fixture(params=[S3, GCS, AZ], ids=["s3", "gs", "az"])
def store(request: pytest.FixtureRequest) -> Iterator[S3 | GCS | AZ]:
    with running(request.param) as started:
        yield started


@pytest.fixture
def s3() -> Iterator[S3]:
    with running(S3) as started:
        yield started


def train(uri: str, mode: str = "copy") -> dict:
    return {"train": {"uri": uri, "mode": mode}}


# -- inputs -----------------------------------------------------------------------------------------------------------


def test_a_prefix_and_an_object_arrive(store, tmp_path: Path):
    odd = "sub/ü ö #1?x=[y]*%2F.txt"
    for key, text in {"data/a.txt": "1", f"data/{odd}": "22", "data2/no.txt": "3"}.items():
        store.put(key, text.encode())
    for number, uri in enumerate(("data", "data/", "data/a.txt")):
        with Attempt(
            tmp_path / str(number), READ, inputs=train(f"{store.scheme}://bucket/{uri}"), environ=store.environ
        ) as attempt:
            assert attempt.run() == [0], attempt.texts(-1)
            assert attempt.texts(0) == (["a.txt 1"] if number == 2 else ["a.txt 1", f"{odd} 22"])
            said = f"copying 1 of 1 files, 1 bytes, from {store.scheme}://bucket/{uri}"
            assert number != 2 or f"input train: {said}" in attempt.texts(-1)
            left = [path.name for path in (attempt.folders[0] / "inputs").iterdir()]
            assert left == ["train"]


def test_every_node_has_its_own_copy(s3: S3, tmp_path: Path):
    s3.put("data/a.txt", b"1")
    s3.put("data/folder-of-a-console/", b"")
    with Attempt(tmp_path, READ, nodes=2, inputs=train("s3://bucket/data/"), environ=s3.environ) as attempt:
        assert attempt.run() == [0, 0]
        assert attempt.texts(0, 0) == attempt.texts(1, 1) == ["a.txt 1"]
        assert all((folder / "inputs" / "train" / "a.txt").is_file() for folder in attempt.folders)


@pytest.mark.parametrize("key", ["../../escaped", "a//b", "./c", "a/../../../escaped"])
def test_hostile_keys_are_refused_and_nothing_is_written(s3: S3, tmp_path: Path, key: str):
    s3.put("data/fine", b"1")
    s3.put(f"data/{key}", b"evil")
    with Attempt(tmp_path, "print('never')", inputs=train("s3://bucket/data/"), environ=s3.environ) as attempt:
        assert attempt.run() == [78]
        assert "the input train has an object whose name is not a valid file name" in attempt.status()["reason"]
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"evil"]
        assert attempt.texts(0) == []


def test_names_that_files_cannot_have_together():
    check_names("x", ["a", "b/c", "b/d/e", "...", "a.b"])
    for keys in (["a", "a/b"], ["/abs"], ["x" * 256], ["ü" * 128], ["a\0b"], ["a/"], [".."], [""]):
        with pytest.raises(Refused, match="the input x has an object"):
            check_names("x", keys)


def test_what_is_missing_is_said_in_one_sentence_each(store, tmp_path: Path):
    wanted = {
        "bucketless": {"uri": f"{store.scheme}://no-such-bucket/data/", "mode": "copy"},
        "empty": {"uri": f"{store.scheme}://bucket/nothing/", "mode": "copy"},
        "mounted": {"uri": f"{store.scheme}://bucket/data/", "mode": "mount"},
        "elsewhere": {"uri": "ftp://host/x", "mode": "copy"},
    }
    with Attempt(tmp_path, "print('never')", inputs=wanted, environ=store.environ) as attempt:
        assert attempt.run() == [78]
        assert attempt.status()["reason"].split("; ") == [
            f"the input bucketless cannot be read: {store.scheme}://no-such-bucket/data: the bucket or object does not exist",
            "the input elsewhere is at ftp://host/x, and a node can read only folders, s3://, gs:// and az://",
            f"the input empty does not exist: no files at {store.scheme}://bucket/nothing/",
            f"the input mounted cannot be mounted on this node ({store.scheme}://bucket/data/): set its mode to copy or stream",
        ]


def test_a_stream_is_left_to_the_script(tmp_path: Path):
    script = "import os; print(os.environ['CLOUDTRAIN_INPUT_TRAIN'])"
    with Attempt(tmp_path, script, inputs=train("s3://bucket/data/", "stream")) as attempt:
        assert attempt.run() == [0]
        assert attempt.texts(0) == ["s3://bucket/data/"]


def test_half_a_copy_is_never_taken_for_whole(s3: S3, tmp_path: Path):
    s3.put("data/a.txt", b"1")
    s3.put("data/b.txt", b"22")
    with Attempt(tmp_path, READ, inputs=train("s3://bucket/data/"), environ=s3.environ) as attempt:
        stale = attempt.folders[0] / "inputs" / ".train.0123456789abcdef.half"
        stale.mkdir(parents=True)
        (stale / "a.txt").write_text("X")
        assert attempt.run() == [0]
        assert attempt.texts(0) == ["a.txt 1", "b.txt 22"]


def test_without_the_clients_the_pip_line_is_told(tmp_path: Path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    line = "needs fsspec and s3fs on the node: pip install 'cloudtrain[storage]'"
    with Attempt(tmp_path / "a", "print(1)", inputs=train("s3://b/data/"), python=python) as attempt:
        assert attempt.run() == [78]
        assert attempt.status()["reason"] == f"the input train (s3://b/data/) {line}"
    with Attempt(tmp_path / "b", "print(1)", output="gs://b/x", python=python) as attempt:
        assert attempt.run() == [78]
        assert attempt.status()["reason"] == f"the output (gs://b/x/run) {line.replace('s3fs', 'gcsfs')}"


# -- output -----------------------------------------------------------------------------------------------------------

SAVE = """
import os, pathlib, sys, time
step = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]) / "step-1"
print(sorted(path.name for path in step.parent.rglob("*")))
(step / "shards").mkdir(parents=True, exist_ok=True)
for number in range(6):
    (step / "shards" / str(number)).write_text(str(number))
(step / "z-last").write_text("z")
(step / "COMPLETE").write_text("all")
pathlib.Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"], "metrics.json").write_text("{}")
pathlib.Path(os.environ["CLOUDTRAIN_MODEL_DIR"], "empty").touch()
sys.exit(int(sys.argv[1]))
"""
SAVED = {
    **{f"home/run/checkpoints/step-1/shards/{number}": str(number).encode() for number in range(6)},
    "home/run/checkpoints/step-1/z-last": b"z",
    "home/run/checkpoints/step-1/COMPLETE": b"all",
    "home/run/outputs/metrics.json": b"{}",
    "home/run/model/empty": b"",
}


NOTES = ("attempts/", "epochs/", "history/", "logs/", "run.json")


def saved(store) -> dict[str, bytes]:
    notes = tuple(f"home/{name}" for name in (".index/", *(f"run/{each}" for each in NOTES)))
    return {key: data for key, data in store.objects().items() if not key.startswith(notes)}


def written(store: S3) -> list[tuple[str, str]]:
    """Return the changes to checkpoints, in the order in which they came."""
    return [change for change in store.changes if change[1].startswith("home/run/checkpoints/")]


@pytest.mark.parametrize("code", [0, 3])
def test_the_output_is_brought_home_however_it_ends(store, tmp_path: Path, code: int):
    with Attempt(
        tmp_path,
        SAVE,
        argv=("train.py", str(code)),
        nodes=2 if code == 0 else 1,
        output=f"{store.scheme}://bucket/home/",
        environ=store.environ,
    ) as attempt:
        assert set(attempt.run()) == {code}, attempt.texts(-1)
        assert saved(store) == SAVED
        (started,) = [key for key in store.objects() if key.startswith("home/run/attempts/")]
        assert started == "home/run/attempts/run-a1-node-0.json"  # simulated nodes share the run's folder
        assert f"output: 10 files were uploaded to {store.scheme}://bucket/home/run" in attempt.texts(-1)


def test_complete_is_uploaded_after_all_that_lies_below_it(s3: S3, tmp_path: Path):
    with Attempt(tmp_path, SAVE, argv=("train.py", "0"), output="s3://bucket/home", environ=s3.environ) as attempt:
        assert attempt.run() == [0]
    order = [key.removeprefix("home/run/") for verb, key in s3.changes if verb == "PUT" and "step-1" in key]
    assert len(order) == 8 and order[-1] == "checkpoints/step-1/COMPLETE"


GATED = """
import os, pathlib, time
run = pathlib.Path(os.environ["CLOUDTRAIN_RUN_DIR"])
step = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]) / "step-1"
print(sorted(str(path.relative_to(step.parent)) for path in step.parent.rglob("*") if path.is_file()), flush=True)
def gate(name):
    while not (run / name).exists():
        time.sleep(0.02)
step.mkdir(exist_ok=True)
(step / "weights").write_text("one")
(step / "COMPLETE").write_text("1")
gate("replace")
(step / "COMPLETE").unlink()
(step / "weights").write_text("three")
(step / "COMPLETE").write_text("1")
gate("prune")
(step / "COMPLETE").unlink()
(step / "weights").unlink()
gate("end")
"""


def test_changes_reach_the_store_during_the_run_and_no_mark_stands_over_half_of_them(s3: S3, tmp_path: Path):
    environ = s3.environ | {"CLOUDTRAIN_SYNC_EVERY_S": "0.1"}
    place = "home/run/checkpoints/step-1"
    with Attempt(tmp_path, GATED, output="s3://bucket/home", environ=environ) as attempt:
        attempt.start()
        wait_for(lambda: saved(s3) == {f"{place}/weights": b"one", f"{place}/COMPLETE": b"1"}, "the first state")
        (tmp_path / "run" / "replace").touch()
        whole = {f"{place}/weights": b"three", f"{place}/COMPLETE": b"1"}
        wait_for(lambda: saved(s3) == whole and written(s3)[-1] == ("PUT", f"{place}/COMPLETE"), "the second state")
        (tmp_path / "run" / "prune").touch()
        wait_for(lambda: not (tmp_path / "run/checkpoints/step-1/weights").exists(), "an empty folder")
        assert saved(s3) == whole, "the only one there is stays while the run may need it"
        (tmp_path / "run" / "end").touch()
        assert attempt.wait() == [0]
        assert saved(s3) == {}
    held = False  # whether the store holds a mark
    for verb, key in [(verb, key.rpartition("/")[2]) for verb, key in s3.changes if key.startswith(place)]:
        assert key == "COMPLETE" or not held, s3.changes
        held = verb == "PUT" if key == "COMPLETE" else held


def test_a_killed_attempt_is_resumed_elsewhere_from_the_store(store, tmp_path: Path):
    environ = store.environ | {"CLOUDTRAIN_SYNC_EVERY_S": "0.1"}
    uri = f"{store.scheme}://bucket/home"
    with Attempt(tmp_path / "a", GATED, output=uri, environ=environ) as attempt:
        attempt.start()
        wait_for(lambda: "home/run/checkpoints/step-1/COMPLETE" in store.objects(), "a checkpoint")
        attempt.launchers[0].kill()  # the guard: a machine that is gone has no time to upload
        attempt.wait()
    for name in ("replace", "prune", "end"):
        (tmp_path / "b" / "run").mkdir(parents=True, exist_ok=True)
        (tmp_path / "b" / "run" / name).touch()
    with Attempt(tmp_path / "b", GATED, output=uri, environ=environ) as attempt:
        assert attempt.run() == [0]
        assert attempt.texts(0)[0] == "['step-1/COMPLETE', 'step-1/weights']"
        assert f"output: downloading 2 files of checkpoints, 4 bytes from {uri}/run" in attempt.texts(-1)
    assert saved(store) == {}  # it has pruned what it was given


def test_checkpoints_that_are_here_stay_unless_the_store_has_whole_ones(s3: S3, tmp_path: Path):
    for name in ("whole/weights", "whole/COMPLETE", "torn/weights", "torn/COMPLETE", "absent/x"):
        s3.put(f"home/run/checkpoints/{name}", b"store")
    folder = tmp_path / "run" / "checkpoints"
    for name in ("whole/weights", "whole/COMPLETE", "torn/weights"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("here")
    with Attempt(tmp_path, "", output="s3://bucket/home", environ=s3.environ) as attempt:
        assert attempt.run() == [0]
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == {
        "whole/weights": "here",
        "whole/COMPLETE": "here",
        "torn/weights": "store",
        "torn/COMPLETE": "store",
        "absent/x": "store",
    }


def test_results_that_cannot_be_brought_home_are_no_success(s3: S3, tmp_path: Path):
    s3.refuse = "home/run/model/"
    for code, state in ((0, "FAILED"), (3, "FAILED")):
        with Attempt(
            tmp_path / str(code), SAVE, argv=("train.py", str(code)), output="s3://bucket/home", environ=s3.environ
        ) as attempt:
            assert attempt.set("output/sync", "TRIES", 2).run() == [code or 74]
            status = attempt.status()
            assert (status["state"], status["by"]) == (state, "launcher" if code == 0 else "script")
            assert "the output is not complete: s3://bucket/home/run: PermissionError" in status["reason"]
            assert attempt.events("result")[0]["code"] == code or 74
            assert (tmp_path / str(code) / "run" / "model" / "empty").exists()  # it is still on the node


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_an_output_that_cannot_be_written_is_refused_before_training(s3: S3, tmp_path: Path, scheme: str):
    with running(GCS) as gcs:
        with Attempt(
            tmp_path, "print('never')", output=f"{scheme}://no-such-bucket/home", environ=s3.environ | gcs.environ
        ) as attempt:
            assert attempt.run() == [78]
            said = f"{scheme}://no-such-bucket/home/run: the bucket or object does not exist"
            assert attempt.status()["reason"] == f"the output cannot be used: {said}"
            assert attempt.texts(0) == []


def test_cancel_breaks_the_last_upload_off(s3: S3, tmp_path: Path):
    script = SAVE.replace("import os", "import os; print('saved', flush=True); import os", 1)
    with Attempt(tmp_path, script, argv=("train.py", "0"), output="s3://bucket/home", environ=s3.environ) as attempt:
        attempt.start()
        wait_for(lambda: any("attempts/" in key for _, key in s3.changes), "the start")
        s3.hold.clear()
        attempt.heard("saved")
        wait_for(lambda: not attempt.status() or attempt.status()["state"] in ("RUNNING", "FAILED"), "the ranks")
        (attempt.folders[0] / "cancel").touch()
        wait_for(lambda: attempt.events("result"), "the outcome, while the store takes nothing")
        s3.hold.set()  # the history of the run waits for it
        assert attempt.wait() == [75]
        assert attempt.status()["state"] == "CANCELLED"


def test_credentials_may_come_as_secrets_of_the_job_and_are_not_logged(s3: S3, tmp_path: Path):
    s3.put("data/a.txt", b"1")
    key = "planted-key-of-a-test"
    with Attempt(
        tmp_path,
        READ,
        inputs=train("s3://bucket/data/"),
        env={"AWS_ENDPOINT_URL": s3.url},
        secrets={"AWS_SECRET_ACCESS_KEY": ["env:K"], "AWS_ACCESS_KEY_ID": ["env:I"]},
        stdin={"secrets": {"env:K": key, "env:I": "planted-id"}, "token": ""},
        environ={"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)},
    ) as attempt:
        assert attempt.run() == [0], attempt.texts(-1)
        assert attempt.texts(0) == ["a.txt 1"]
        for path in attempt.folders[0].rglob("*"):
            assert not path.is_file() or key.encode() not in path.read_bytes(), path


def test_the_results_event_says_why(s3: S3, tmp_path: Path):
    s3.refuse = "home/run/outputs/"
    with Attempt(tmp_path, SAVE, argv=("train.py", "0"), output="s3://bucket/home", environ=s3.environ) as attempt:
        assert attempt.set("output/sync", "TRIES", 2).run() == [74]
        (event,) = attempt.events("result")
        assert (event["code"], event["state"], event["by"]) == (74, "FAILED", "launcher")
        assert json.dumps(event).count("not complete") == 1
