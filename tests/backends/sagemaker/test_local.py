"""The backend sagemaker-local: its plans everywhere; with Docker the contract suite and two hosts in real containers."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.sagemaker import docker as docker_engine
from cloudtrain.backends.sagemaker import local_job, local_s3
from cloudtrain.backends.sagemaker.local import SagemakerLocalBackend
from cloudtrain.backends.sagemaker.local_request import IMAGE
from cloudtrain.errors import BackendError, BadJob
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.simulators.sagemaker.server import REGION, Fault, Simulator
from cloudtrain.source.bundle import Bundle
from cloudtrain.source.node_code import module
from tests.backends.sagemaker.test_backend import BUCKET, simulator  # noqa: F401 - a fixture
from tests.conftest import wait_for

# -- without Docker ---------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, home: Path, tmp_path: Path) -> None:
        self.home, self.source = home, tmp_path / "source"
        self.source.mkdir()
        self.backend = SagemakerLocalBackend({}, home / "runs")

    def plan(self, script: str = "print('done')\n", run: str = "near", attempt: int = 1, **changes):
        (self.source / "train.py").write_text(script)
        data = {"name": "near", "source": str(self.source), "entrypoint": "train.py"}
        job = Job.from_dict({**data, "environment": {"requirements": "none"}, **changes})
        bundle = Bundle.make(self.source, self.home / "bundles")
        return self.backend.plan(job, bundle, run, attempt), bundle

    def log_texts(self, handle: str) -> list[str]:
        return [line.text for line in self.backend.logs(handle) if line.rank >= 0]

    def final(self, handle: str):
        wait_for(lambda: self.backend.status(handle).state.final, "its end")
        return self.backend.status(handle)


@pytest.fixture
def bench(home: Path, tmp_path: Path) -> Bench:
    return Bench(home, tmp_path)


def test_the_request_is_that_of_local_mode(bench: Bench, tmp_path: Path) -> None:
    inputs = {"texts": str(tmp_path), "one": f"file://{tmp_path}/x.jsonl", "web": {"uri": "hf://d/x", "mode": "stream"}}
    resources = {"use_spot": True, "instance_type": "ml.m5.xlarge"}
    plan, _ = bench.plan(inputs=inputs, resources=resources, num_nodes=2)
    request, folder = plan.request, bench.home / "runs" / "near"
    assert request["ResourceConfig"] == {"InstanceCount": 2, "InstanceType": "local"}
    assert request["CheckpointConfig"]["S3Uri"] == f"file://{folder}/checkpoints"
    channels = {c["ChannelName"]: c["DataSource"]["FileDataSource"]["FileUri"] for c in request["InputDataConfig"]}
    source = f"file://{folder}/a1/code/source.tar.gz"
    assert channels == {"texts": f"file://{tmp_path}", "one": f"file://{tmp_path}/x.jsonl", "cloudtrain": source}
    assert "EnableManagedSpotTraining" not in request and "MaxWaitTimeInSeconds" not in request["StoppingCondition"]
    assert IMAGE in " ".join(plan.notes)
    orders = [json.loads(piece) for piece in request["HyperParameters"].values()]
    assert Manifest.decode(orders).inputs["one"]["file"] == "x.jsonl"


def test_roles_with_resources_of_their_own_divide_the_gpus_of_this_machine(bench: Bench, tmp_path: Path) -> None:
    judge = {"run": "judge", "num_nodes": 2}
    roles = {"trainer": {}, "server": {"run": "x", "resources": {"accelerators": "L4"}}, "judge": judge}
    judge["resources"] = {"cpus": 2}
    plan, _ = bench.plan(roles=roles, resources={"accelerators": "L4:2"})
    assert plan.request["ResourceConfig"] == {"InstanceCount": 4, "InstanceType": "local_gpu"}
    commands = [
        docker_engine.container_command(tmp_path, "near-a1", f"algo-{number}", plan.request, [])
        for number in range(1, 5)
    ]
    chosen = [next(word for word in words if word.startswith("CLOUDTRAIN_GPUS=")) for words in commands]
    assert chosen == [f"CLOUDTRAIN_GPUS={numbers}" for numbers in ("0,1", "2", "", "")]
    assert ["--gpus" in words for words in commands] == [True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"inputs": {"x": "s3://bucket/x"}}, "inputs.x.uri"),
        ({"inputs": {"cloudtrain": "/data"}}, "inputs.cloudtrain"),
        ({"output": "s3://bucket/out"}, "output"),
        ({"output": "gs://bucket/out"}, "output"),
        ({"num_nodes": 2, "resources": {"accelerators": "L4:1"}}, "num_nodes"),
    ],
)
def test_what_local_mode_cannot_do_is_refused(bench: Bench, changes: dict, path: str) -> None:
    with pytest.raises(BadJob) as caught:
        bench.plan(**changes)
    assert path in {problem.path for problem in caught.value.problems}


def test_s3_is_read_and_written_where_that_is_asked_for(bench: Bench) -> None:
    with pytest.raises(BadJob, match="options.sagemaker-local.s3: true"):
        bench.plan(inputs={"x": "s3://bucket/x"})
    bench.backend = SagemakerLocalBackend({"s3": True}, bench.home / "runs")
    inputs = {"texts": {"uri": "s3://b/texts", "mode": "mount"}, "one": "s3://b/x.jsonl", "near": str(bench.source)}
    plan, _ = bench.plan(inputs=inputs, output="s3://b/out/")
    request = plan.request
    sources = {channel["ChannelName"]: channel["DataSource"] for channel in request["InputDataConfig"]}
    uris = {name: source["S3DataSource"]["S3Uri"] for name, source in sources.items() if "S3DataSource" in source}
    assert uris == {"texts": "s3://b/texts/", "one": "s3://b/x.jsonl"} and set(sources) > {"near", "cloudtrain"}
    assert request["OutputDataConfig"]["S3OutputPath"] == "s3://b/out/near"
    assert request["CheckpointConfig"]["S3Uri"] == f"file://{bench.home}/runs/near/checkpoints"
    assert "with its own credentials" in " ".join(plan.notes)
    for wrong in ({"inputs": {"x": "gs://b/x"}}, {"inputs": {"x": "s3:///x"}}, {"output": "gs://b/x"}):
        with pytest.raises(BadJob):
            bench.plan(**wrong)


S3_JOB = {
    "inputs": {"texts": "s3://training/texts", "one": "s3://training/texts/a.txt"},
    "output": "s3://training/out",
}


@pytest.fixture
def stored(bench: Bench, simulator: Simulator) -> Bench:  # noqa: F811
    """A bench that may use S3, with two texts in a bucket beside what only begins like them."""
    for key in ("texts/a.txt", "texts/deep/b.txt", "texts/a.txt.old", "texts2/c.txt"):
        simulator.call("s3", "put_object", Bucket=BUCKET, Key=key, Body=key.encode())
    bench.backend = SagemakerLocalBackend(
        {"s3": True, "endpoint": simulator.url, "region": REGION}, bench.home / "runs"
    )
    return bench


def attempt(bench: Bench, run: str = "near", **changes) -> tuple[dict, local_s3.LocalS3, Path]:
    """Plan a job and return its request and its S3 access, as the supervising process finds them."""
    plan, _ = bench.plan(run=run, **{**S3_JOB, **changes})
    folder = bench.home / "runs" / run / "a1"
    folder.mkdir(parents=True)
    s3_options = {name: bench.backend._options.get(name) for name in ("region", "profile", "endpoint")}
    (folder / "store.json").write_text(json.dumps(s3_options))
    return json.loads(json.dumps(plan.request)), local_s3.LocalS3(folder), folder


def test_channels_are_brought_here_and_results_taken_there(stored: Bench, simulator: Simulator, tmp_path: Path) -> None:  # noqa: F811
    request, store, folder = attempt(stored)
    local_request = store.download_inputs(request, lambda: False)
    assert not any("S3DataSource" in channel["DataSource"] for channel in local_request["InputDataConfig"])
    downloaded = {
        str(path.relative_to(folder)): path.read_text() for path in (folder / "inputs").rglob("*") if path.is_file()
    }
    assert downloaded == {
        "inputs/texts/a.txt": "texts/a.txt",
        "inputs/texts/a.txt.old": "texts/a.txt.old",
        "inputs/texts/deep/b.txt": "texts/deep/b.txt",
        "inputs/one/a.txt": "texts/a.txt",
    }
    (folder / "code").mkdir()
    (folder / "code" / "source.tar.gz").touch()
    mounts = local_job.prepare_mounts(tmp_path / "ml", "algo-1", ["algo-1"], local_request)
    assert (f"{folder}/inputs/one", "/opt/ml/input/data/one", False) in mounts
    (folder.parent / "model" / "weights").write_text("w")
    store.upload_results(local_request, folder.parent)
    store.remove_inputs()
    assert not (folder / "inputs").exists()
    body = simulator.call("s3", "get_object", Bucket=BUCKET, Key="out/near/near-a1/output/model.tar.gz")["Body"].read()
    with tarfile.open(fileobj=BytesIO(body)) as archive:
        assert [member.name for member in archive if member.isfile()] == ["./weights"]
    listed = simulator.call("s3", "list_objects_v2", Bucket=BUCKET, Prefix="out/")["Contents"]
    assert [item["Key"] for item in listed] == ["out/near/near-a1/output/model.tar.gz"], "an empty folder is not taken"


def test_the_source_goes_through_a_bucket_that_is_named(stored: Bench, simulator: Simulator) -> None:  # noqa: F811
    stored.backend = SagemakerLocalBackend({**stored.backend._options, "bucket": BUCKET}, stored.home / "runs")
    plan, bundle = stored.plan()
    uri = plan.request["InputDataConfig"][-1]["DataSource"]["S3DataSource"]["S3Uri"]
    assert uri == f"s3://{BUCKET}/cloudtrain/code/{bundle.sha256}/"
    for first in (True, False):
        simulator.uploaded_bytes = 0
        assert stored.backend._upload(plan, bundle)
        assert bool(simulator.uploaded_bytes) == first, "unchanged source is not uploaded again"
    request, store, folder = attempt(stored, "other", inputs={}, output=None)
    store.download_inputs(request, lambda: False)
    assert (folder / "inputs/cloudtrain/source.tar.gz").read_bytes() == Path(bundle.path).read_bytes()
    for wrong in ({"bucket": BUCKET}, {"bucket": "No_Name", "s3": True}):
        stored.backend = SagemakerLocalBackend(wrong, stored.home / "runs")
        with pytest.raises(BadJob) as caught:
            stored.plan()
        assert [problem.path for problem in caught.value.problems] == ["options.sagemaker-local.bucket"]


def test_what_s3_refuses_is_a_sentence(stored: Bench, simulator: Simulator) -> None:  # noqa: F811
    request, store, _ = attempt(stored, inputs={"x": f"s3://{BUCKET}/nothing"})
    with pytest.raises(BackendError, match=r"the input x does not exist: no files at s3://training/nothing/"):
        store.download_inputs(request, lambda: False)
    request, store, folder = attempt(
        stored, "other", inputs={"x": "s3://no-such-bucket/x"}, output="s3://no-such-bucket/y"
    )
    with pytest.raises(BackendError, match="there is no bucket no-such-bucket"):
        store.download_inputs(request, lambda: False)
    (folder.parent / "model").mkdir()
    (folder.parent / "model" / "weights").write_text("w")
    with pytest.raises(BackendError, match="there is no bucket no-such-bucket"):
        store.upload_results(request, folder.parent)
    simulator.faults.append(Fault("GetObject", 403, "AccessDenied", times=9))
    request, store, _ = attempt(stored, "denied")
    with pytest.raises(BackendError, match="AWS denies s3:GetObject") as caught:
        store.download_inputs(request, lambda: False)
    assert "cloudtrain permissions" in caught.value.hint
    request, store, folder = attempt(stored, "cancelled")
    assert store.download_inputs(request, lambda: True) == request and not (folder / "inputs").exists()


def test_without_an_engine_it_says_what_to_do(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{bench.home}/nobody.sock")
    monkeypatch.setattr("cloudtrain.backends.docker.PROGRAM", "no-such-docker")
    with pytest.raises(BackendError, match="Docker is not installed") as caught:
        bench.backend.submit(*bench.plan())
    assert "install Docker" in caught.value.hint
    assert [problem.message for problem in bench.backend.check()] == ["Docker is not installed on this machine"]


ONE, TWO, ID = (f"sha256:{letter * 64}" for letter in "abc")


@pytest.mark.parametrize(
    ("named", "digests", "image"),
    [
        (IMAGE, [], ID),  # built here
        (IMAGE, None, ID),
        (IMAGE, ["<none>@<none>"], ID),
        ("r.example.com:5000/team/x:2", [f"other/x@{ONE}", f"r.example.com:5000/team/x@{TWO}"], 1),
        ("ubuntu", [f"mine/ubuntu@{ONE}", f"ubuntu@{TWO}"], 1),
        ("docker.io/library/ubuntu:24.04", [f"mine/ubuntu@{ONE}", f"ubuntu@{TWO}"], 1),
        ("mine:1", [f"ubuntu@{ONE}", f"other@{TWO}"], 0),  # it is the one that was pulled as ubuntu
        (f"x/y@{TWO}", [f"x/y@{ONE}", f"x/y@{TWO}"], 1),
        (ID, [f"x/y@{ONE}"], 0),
    ],
)
def test_an_image_is_known_by_its_registrys_digest_else_by_its_id(named: str, digests, image) -> None:
    wanted = image if isinstance(image, str) else digests[image]
    assert docker_engine.digest_of(named, {"Id": ID, "RepoDigests": digests}) == wanted
    assert docker_engine.digest_of(named, {"Id": "abc"}) == ""


# An engine's command line as far as an attempt asks: it knows the image, and its containers end well at once.
ENGINE = """\
#!/bin/sh
case "$1 $2 $4" in
  "image inspect {{json .}}") INSPECTED ;;
  inspect*) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("inspected", "image"),
    [
        (f"""echo '{{"Id": "{ID}", "RepoDigests": []}}'""", ID),
        (f"""echo '{{"Id": "{ID}", "RepoDigests": ["cloudtrain-train@{ONE}"]}}'""", f"cloudtrain-train@{ONE}"),
        ("echo no such image >&2; exit 1", ""),
        ("echo no JSON", ""),
        ("echo []", ""),
    ],
)
def test_the_keeper_keeps_what_the_engine_tells_and_an_attempt_goes_on_without(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inspected: str, image: str
) -> None:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(ENGINE.replace("INSPECTED", inspected))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert bench.backend.images(str(bench.home / "runs" / "near" / "a1")) == {}
    handle = bench.backend.submit(*bench.plan(num_nodes=2))
    assert bench.final(handle).state is State.SUCCEEDED, bench.final(handle)
    assert bench.backend.images(handle) == ({0: image, 1: image} if image else {})


@pytest.mark.parametrize("nodes", [1, 2])
def test_several_hosts_on_a_network_without_names_are_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: int
) -> None:
    """As podman's networks are on Debian 12 without a plugin: the second host would wait for the first one's name."""
    names = "case \"$1 $2\" in 'network inspect') echo '\"dns_enabled\": false' ;; esac\n"
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(ENGINE.replace("INSPECTED", "exit 1") + names)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    status = bench.final(bench.backend.submit(*bench.plan(num_nodes=nodes)))
    assert status.state is (State.SUCCEEDED if nodes == 1 else State.FAILED), status
    assert ("aardvark-dns" in status.reason) is (nodes == 2), status


@pytest.mark.parametrize("rootless", [False, True])
def test_files_of_the_containers_become_the_users(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rootless: bool
) -> None:
    """For a user who is not root: root's files, or those of another id where the engine's root is the user."""
    ran = tmp_path / "ran"
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {ran}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    handle = bench.home / "runs" / "near" / "a1"
    handle.mkdir(parents=True)
    stat = Path.lstat
    written_by = 100_999 if rootless else 0
    monkeypatch.setattr(Path, "lstat", lambda path: SimpleNamespace(st_uid=written_by, st_mode=stat(path).st_mode))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 1001)
    local_job.end_containers(handle, bench.plan()[0].request)
    taken = [line.partition("--mount ")[2] for line in ran.read_text().splitlines() if line.startswith("run --rm")]
    owner = "0:0" if rootless else "1000:1001"
    given = f"type=bind,source={handle.parent},target=/files --entrypoint chown {IMAGE} -hR {owner} /files"
    assert given in taken
    ran.write_text("")
    monkeypatch.setattr(os, "getuid", lambda: written_by)
    local_job.end_containers(handle, bench.plan()[0].request)
    assert "chown" not in ran.read_text()


def test_the_container_sees_what_sagemaker_lays(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "a,b").mkdir()
    plan, _ = bench.plan(num_nodes=2, inputs={"x": str(tmp_path / "a,b")})
    code = bench.home / "runs" / "near" / "a1" / "code"
    code.mkdir(parents=True)
    (code / "source.tar.gz").touch()
    mounts = local_job.prepare_mounts(tmp_path / "ml", "algo-2", ["algo-1", "algo-2"], plan.request)
    config = json.loads((tmp_path / "ml/input/config/resourceconfig.json").read_text())
    assert (config["current_host"], config["hosts"]) == ("algo-2", ["algo-1", "algo-2"])
    assert set(json.loads((tmp_path / "ml/input/config/inputdataconfig.json").read_text())) == {"x", "cloudtrain"}
    kept = json.loads((tmp_path / "ml/input/config/hyperparameters.json").read_text())
    assert kept == plan.request["HyperParameters"]
    assert (f"{code}/source.tar.gz", "/opt/ml/input/data/cloudtrain/source.tar.gz", False) in mounts
    command = docker_engine.container_command(tmp_path, "near-a1", "algo-2", plan.request, mounts)
    given = [command[n + 1] for n, word in enumerate(command) if word == "--mount"]
    assert f'type=bind,"source={tmp_path}/a,b",target=/opt/ml/input/data/x,readonly' in given
    assert f"type=bind,source={bench.home}/runs/near/checkpoints,target=/opt/ml/checkpoints" in given
    assert not any("publish" in word or word.startswith("0.0.0.0") for word in command)


def test_a_later_attempt_anywhere_on_the_runs_folder_ends_this_one(bench: Bench) -> None:
    plan, _ = bench.plan()
    folder = bench.home / "runs" / "near" / "a1"
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps(plan.request))
    job = local_job.LocalJob(folder)
    job._starts = job._claim()
    job._check_current()
    module("launcher.output.starts").Starts(str(folder.parent), 2)  # as a launcher on this machine does
    with pytest.raises(BackendError, match="attempt 2 of this run has started"):
        job._check_current()
    with pytest.raises(BackendError, match="attempt 1 does not start"):
        local_job.LocalJob(folder)._claim()


def test_what_others_print_is_numbered_between_the_launchers_lines(tmp_path: Path) -> None:
    host = object.__new__(local_job._Host)
    ours = "0 -1 2026-11-22T00:00:00.000000Z first", "1 0 2026-11-22T00:00:00.000000Z second"
    text = f"warning\n{ours[0]}\nnoise\n{ours[1]}\n"
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as file:
        host._log = file
        host._process = subprocess.Popen(["printf", "%s", text], stdout=subprocess.PIPE)
        host._copy_log()
        host._process.wait()
        host._process.stdout.close()
    lines = [line.split(" ", 3) for line in log.read_text().splitlines()]
    assert [(line[0], line[1], line[3]) for line in lines] == [
        ("0", "-1", "warning"),
        ("1", "-1", "first"),
        ("2", "-1", "noise"),
        ("3", "0", "second"),
    ]


@pytest.mark.parametrize("name", ["setup.py", "requirements.txt"])
def test_a_source_that_the_toolkit_would_install_is_refused(bench: Bench, name: str) -> None:
    bench.backend = SagemakerLocalBackend({"entry": "toolkit"}, bench.home / "runs")
    bench.plan()
    (bench.source / name).write_text("")
    with pytest.raises(BadJob, match=f"{name} in the source: the toolkit would install"):
        bench.plan()
