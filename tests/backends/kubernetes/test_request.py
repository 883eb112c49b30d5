"""Jobs as objects of Kubernetes: golden manifests, each held against the strict schemas of every supported release; what
schemas let through and a server would not; overlays; the command of the pod."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

import pytest

from cloudtrain.backends import fetch_program
from cloudtrain.backends.kubernetes import fetch_pod, rules
from cloudtrain.backends.kubernetes.overlay import merge_manifest
from cloudtrain.backends.kubernetes.request import MAX_INLINE_BYTES, Request, kubectl_manifests
from cloudtrain.backends.manifest import Manifest
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle, File
from tests.conftest import wait_for

GOLDEN = Path(__file__).parents[2] / "golden" / "kubernetes"
RELEASES = [f"1.{minor}" for minor in range(29, 38)]
CASES = {
    "one_node": ({}, {}, 1000),
    "one_node_restarted": ({"retry": {"max_attempts": 3}}, {}, 1000),
    "two_nodes": ({"num_nodes": 2, "processes_per_node": 2}, {}, 1000),
    "gpus": (
        {"num_nodes": 4, "resources": {"accelerators": "H100:8", "cpus": 96, "memory": "1TiB", "disk_gb": 500}},
        {
            "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
            "extended_resources": {"vpc.amazonaws.com/efa": 32},
            "ipc_lock": True,
            "shm": "64GiB",
            "topology": "topology.kubernetes.io/zone",
        },
        1000,
    ),
    "spot": (
        {"resources": {"accelerators": "L4", "use_spot": True}},
        {"spot_selector": {"cloud.google.com/gke-spot": "true"}},
        1000,
    ),
    "restricted": (
        {"num_nodes": 2, "resources": {"cpus": 8, "memory": "32GiB"}},
        {"security": "restricted", "run_as_user": 2000, "network_policy": True, "cpu_limits": True},
        1000,
    ),
    "large_source": ({"output": "gs://bucket/results/"}, {}, MAX_INLINE_BYTES + 1),
    "jobset": ({"num_nodes": 2, "retry": {"max_attempts": 3}}, {"kind": "jobset", "queue": "research"}, 1000),
    "roles": (
        {
            "entrypoint": None,
            "secrets": {"HF_TOKEN": ["k8s:hub/token"]},
            "roles": {
                "trainer": {"entrypoint": "train.py", "num_nodes": 2, "resources": {"accelerators": "H100:8"}},
                "server": {"run": "serve", "image": "vllm:1", "resources": {"accelerators": "L4"}, "secrets": ["HF_TOKEN"]},
            },
        },
        {"kind": "jobset", "queue": "research"},
        1000,
    ),
    "colocated": (
        {
            "entrypoint": None,
            "secrets": {"HF_TOKEN": ["k8s:hub/token"]},
            "roles": {
                "trainer": {"entrypoint": "train.py", "num_nodes": 2, "resources": {"accelerators": "H100:6", "cpus": 64}},
                "server": {
                    "run": "serve", "image": "vllm:1", "resources": {"accelerators": "H100:2"},
                    "secrets": ["HF_TOKEN"], "colocate": "trainer",
                },
            },
        },
        {"extended_resources": {"vpc.amazonaws.com/efa": 32}},
        1000,
    ),
    "jobset_restarted": (
        {"num_nodes": 2, "retry": {"max_attempts": 3, "by": "cluster"}, "output": "gs://bucket/out"}, {"kind": "jobset"}, 1000
    ),
    "trainjob": (
        {"num_nodes": 2, "image": None, "resources": {"accelerators": "H100:8", "memory": "1TiB"}},
        {"kind": "trainjob", "runtime": "torch-distributed", "node_selector": {"rack": "a"}, "service_account": "trainer"},
        1000,
    ),
    "claims": (
        {"output": "/data/out", "inputs": {"train": "/sets/imagenet"}},
        {"volumes": [{"claim": "shared", "path": "/data"}, {"claim": "sets", "path": "/sets", "read_only": True}]},
        1000,
    ),
    "everything": (
        {
            "num_nodes": 2,
            "image": "registry.example/team/train:1",
            "labels": {"team": "nlp", "user": "me"},
            "secrets": {"HF_TOKEN": ["k8s:hugging-face/token", "k8s:spare/token"]},
            "resources": {"instance_type": "p4d.24xlarge", "accelerators": "A100:8"},
            "limits": {"max_runtime": "2h", "grace": "2m", "max_wait": "1h"},
            "output": "s3://bucket/out",
        },
        {
            "namespace": "ml",
            "queue": "research",
            "service_account": "trainer",
            "pull_secrets": ["registry"],
            "priority_class": "high",
            "tolerations": [{"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["a", "b"]}]}]}}},
            "ttl": "12h",
            "python": "/opt/conda/bin/python",
            "overlay": {
                "metadata": {"annotations": {"team.example/cost": "42"}},
                "spec": {"template": {"spec": {
                    "hostNetwork": True,
                    "dnsPolicy": "ClusterFirstWithHostNet",
                    "containers": [{"name": "node", "imagePullPolicy": "Always",
                                    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
                }}},
            },
        },
        1000,
    ),
}  # fmt: skip


def made(changes: dict, options: dict, size: int = 1000, attempt: int = 1) -> Request:
    data = {"name": "golden", "source": "/", "entrypoint": "train.py", "image": "img:1", "args": ["--tag", "a b"]}
    job = Job.from_dict({**data, **changes})
    bundle = Bundle(Path("x.tar.gz"), "5" * 64, "6" * 64, size, (File("train.py", 1, 0o644),), None, False, "/")
    return Request(job, bundle, "golden-run", attempt, options)


def problems(*arguments) -> list[str]:
    return [problem.path for problem in made(*arguments).problems]


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str):
    found = made(*CASES[case])
    assert found.problems == []
    env = found.job["spec"]["template"]["spec"]["containers"][0]["env"]
    pieces = [item["value"] for item in env if item["name"].startswith("CLOUDTRAIN_MANIFEST_")]
    assert Manifest.decode(pieces) == found.manifest
    text = json.dumps({**found.to_dict(), "notes": found.notes}, indent=2)
    for piece in pieces:
        text = text.replace(piece, "${manifest}")
    text = text.replace(json.dumps(fetch_program.UNPACK), '"${podstart}"') + "\n"
    golden = GOLDEN / f"{case}.json"
    if os.environ.get("CLOUDTRAIN_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_takes_the_manifests_strictly(release: str, monkeypatch: pytest.MonkeyPatch):
    import kubernetes_validate
    from kubernetes_validate import utils

    monkeypatch.setattr(utils, "schema_contents", cache(utils.schema_contents))  # it parses them for each manifest
    for case in CASES.values():
        request = made(*case).to_dict()
        manifests = [*request["manifests"], *kubectl_manifests(request, b"packed")]
        for manifest in (each for each in manifests if each["kind"] not in ("JobSet", "TrainJob")):  # test_jobset.py
            kubernetes_validate.validate(manifest, release, strict=True)


def test_the_oracle_is_not_blind():
    import kubernetes_validate

    job = made({}, {}).job
    for wrong in ({"spec": {"completion": 1}}, {"spec": {"completions": "two"}}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(merge_manifest(job, wrong), RELEASES[-1], strict=True)


def test_applicable_manifests_need_no_server_to_fill_them_in():
    request = made({"num_nodes": 2}, {}).to_dict()
    job, service, code = kubectl_manifests(request, b"packed")
    assert (job["kind"], service["kind"], code["kind"]) == ("Job", "Service", "ConfigMap")
    assert job["spec"]["suspend"] is False and code["binaryData"] == {"source.tar.gz": "cGFja2Vk"}
    assert "${" not in json.dumps([service, code, job["metadata"], job["spec"]["template"]["spec"]["volumes"]])
    assert not any("ownerReferences" in found["metadata"] for found in (job, service, code))
    queued = kubectl_manifests(made({}, {"queue": "q"}).to_dict(), b"")
    assert queued[0]["spec"]["suspend"] is True, "Kueue starts it"


# What schemas let through; a real server refused every one of them (facts).
SEEDED = [
    ({"spec": {"completionMode": "Indxed"}}, "spec.completionMode"),
    ({"spec": {"template": {"spec": {"restartPolicy": "Always"}}}}, "spec.template.spec.restartPolicy"),
    ({"spec": {"completions": None}}, "spec.completions"),
    ({"metadata": {"name": "Golden_Run"}}, "metadata.name"),
    ({"metadata": {"name": "n" * 64}}, "metadata.name"),
    ({"spec": {"template": {"spec": {"containers": [
        {"name": "node", "resources": {"limits": {"nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "1"}}}]}}}},
     "spec.template.spec.containers[0].resources.limits.nvidia.com/gpu"),
    ({"spec": {"template": {"spec": {"restartPolicy": "OnFailure"}}}}, "spec.podFailurePolicy"),
    ({"spec": {"maxFailedIndexes": 3, "backoffLimitPerIndex": 0}}, "spec.maxFailedIndexes"),
    ({"spec": {"template": {"spec": {"containers": [
        {"name": "node", "volumeMounts": [{"name": "nowhere", "mountPath": "/x"}]}]}}}},
     "spec.template.spec.containers[0].volumeMounts[2].name"),
    ({"spec": {"template": {"spec": {"containers": [{"name": "node", "resources": {"limits": {"memory": "8 GB"}}}]}}}},
     "spec.template.spec.containers[0].resources.limits.memory"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "path"), SEEDED, ids=[path for _, path in SEEDED])
def test_what_schemas_let_through_is_caught(fault: dict, path: str):
    import kubernetes_validate

    job = made({}, {}).job
    assert list(rules.check_job(job)) == []
    wrong = merge_manifest(job, fault)
    kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)
    assert path in [rule.path for rule in rules.check_job(wrong)]
    assert problems({}, {"overlay": fault}) != [], "an overlay cannot bring it in"


@pytest.mark.parametrize(
    ("changes", "options", "path"),
    [
        ({"image": None}, {}, "image"),
        ({"labels": {"team!": "x"}}, {}, "labels.team!"),
        ({"labels": {"team": "n l p"}}, {}, "labels.team"),
        ({"resources": {"use_spot": True}}, {}, "options.kubernetes.spot_selector"),
        ({"secrets": {"A": "k8s:Bad/key"}}, {}, "secrets.A"),
        ({"output": "/data/out"}, {}, "output"),
        ({"inputs": {"a": "/data/set"}}, {"volumes": [{"claim": "c", "path": "/dat"}]}, "inputs.a.uri"),
        ({"inputs": {"a": {"uri": "gs://b/x", "mode": "mount"}}}, {}, "inputs.a.mode"),
        ({}, {"shm": "much"}, "options.kubernetes.shm"),
        ({}, {"ttl": "soon"}, "options.kubernetes.ttl"),
        ({"args": [os.urandom(90_000).hex()]}, {}, "args"),
        ({"num_nodes": 2, "parallelism": {"strategy": "fsdp"}}, {}, "parallelism.strategy"),
        ({}, {"overlay": {"spec": {"suspend": False}}}, "options.kubernetes.overlay.spec.suspend"),
        ({}, {"overlay": {"spec": {"backoffLimit": 6}}}, "options.kubernetes.overlay.spec.backoffLimit"),
        ({}, {"overlay": {"metadata": {"namespace": "x"}}}, "options.kubernetes.overlay.metadata.namespace"),
        (
            {},
            {"overlay": {"spec": {"template": {"spec": {"containers": [{"name": "node", "command": ["sh"]}]}}}}},
            "options.kubernetes.overlay.spec.template.spec.containers.node.command",
        ),
        (
            {},
            {"overlay": {"spec": {"template": {"spec": {"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}}}}},
            "options.kubernetes.overlay.spec.template.spec.volumes",
        ),
        (
            {},
            {"overlay": {"spec": {"template": {"metadata": {"labels": {"cloudtrain.dev/run": "x"}}}}}},
            "options.kubernetes.overlay.spec.template.metadata.labels.cloudtrain.dev/run",
        ),
    ],
)
def test_what_cannot_be_is_a_problem_of_its_field(changes: dict, options: dict, path: str):
    assert problems(changes, options) == [path]


def test_a_large_source_needs_a_place():
    assert problems({}, {}, MAX_INLINE_BYTES + 1) == ["source"]
    found = made({"output": "s3://b/x"}, {}, MAX_INLINE_BYTES + 1)
    assert found.source == f"s3://b/x/src/{'5' * 64}.tar.gz" and [o["kind"] for o in found.others] == []


def test_our_variables_survive_every_overlay():
    env = [{"name": "MASTER_ADDR", "value": "elsewhere"}]
    overlay = {"spec": {"template": {"spec": {"containers": [{"name": "node", "env": env}]}}}}
    assert problems({}, {"overlay": overlay})[0].endswith("containers.node.env.MASTER_ADDR")


def test_kubernetes_would_expand_nothing_in_the_command():
    assert "$(" not in fetch_program.UNPACK


# -- the command of the pod -------------------------------------------------------------------------------------------


def packed(folder: Path, launcher: str) -> tuple[Path, str]:
    """Write a bundle of one launcher and return its path and the digest of the tar in it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        member = tarfile.TarInfo(".cloudtrain/launch.py")
        member.size = len(launcher)
        tar.addfile(member, io.BytesIO(launcher.encode()))
    path = folder / "source.tar.gz"
    path.write_bytes(gzip.compress(stream.getvalue()))
    return path, hashlib.sha256(stream.getvalue()).hexdigest()


@pytest.mark.parametrize("whole", [True, False])
def test_the_pod_unpacks_its_source_and_runs_the_launcher(tmp_path: Path, whole: bool):
    path, digest = packed(tmp_path, "import os, sys; print(os.getpid()); sys.exit(41)")
    names = {
        fetch_program.SOURCE: path,
        fetch_program.DIGEST: digest if whole else "0" * 64,
        fetch_program.WORK: tmp_path / "work",
    }
    env = {"PATH": os.environ["PATH"], **{name: str(value) for name, value in names.items()}}
    first = subprocess.run(
        [sys.executable, "-c", fetch_program.UNPACK], env=env, capture_output=True, text=True, timeout=120
    )
    if whole:
        assert (first.returncode, first.stdout) == (0, ""), first.stderr
        launcher = [sys.executable, str(tmp_path / "work" / fetch_program.LAUNCHER)]
        with subprocess.Popen(launcher, env=env, stdout=subprocess.PIPE, text=True) as pod:
            said, _ = pod.communicate(timeout=120)
        assert (pod.returncode, said.split()) == (41, [str(pod.pid)]), "no shell in between: SIGTERM reaches it"
    else:
        assert first.returncode == 78 and "its content is not what its name says" in first.stdout


def test_secrets_are_seen_by_the_launcher_alone():
    pod = made({"secrets": {"HF_TOKEN": "k8s:hf/token"}}, {}).job["spec"]["template"]["spec"]
    text = json.dumps(pod["initContainers"])
    assert "secretKeyRef" not in text and "CLOUDTRAIN_MANIFEST" not in text
    assert [item["valueFrom"] for item in pod["containers"][0]["env"] if "HF" in item["name"].upper()] == [
        {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}
    ]


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, 1),
        ({"retry": {"max_attempts": 3}}, 3),
        ({"retry": {"max_attempts": 3, "on_events": ["lost"]}}, 1),
        ({"num_nodes": 2, "retry": {"max_attempts": 3}}, 1),
    ],
)
def test_only_a_pod_that_is_alone_is_started_anew_by_the_cluster(changes: dict, starts: int):
    spec = made(changes, {}).job["spec"]
    first, *others = spec["podFailurePolicy"]["rules"]
    assert spec["backoffLimit"] == starts - 1 and "backoffLimitPerIndex" not in spec
    assert first["action"] == ("FailJob" if starts == 1 else "Count")
    assert {rule["action"] for rule in others} == {"FailJob"}


def test_the_pod_that_gives_out_a_claim_wants_its_word_and_leaves_its_folder_alone(tmp_path: Path, held: socket.socket):
    (tmp_path / "base" / "model").mkdir(parents=True)
    (tmp_path / "base" / "model" / "m").write_text("0123456789")
    (tmp_path / "secret").write_text("not given out")
    (tmp_path / "base" / "model" / "link").symlink_to(tmp_path / "secret")
    port = held.getsockname()[1]
    env = {"CLOUDTRAIN_BASE": str(tmp_path / "base"), "CLOUDTRAIN_POD_IP": "127.0.0.1", "CLOUDTRAIN_PORT": str(port)}
    env |= {"CLOUDTRAIN_WORD_SHA256": hashlib.sha256(b"word").hexdigest(), "PATH": os.environ["PATH"]}

    def ask(path: str, word: str = "word", **headers: str) -> tuple[int, bytes]:
        headers[fetch_pod.AUTH_HEADER] = word
        wanted = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers=headers)
        try:
            with urllib.request.urlopen(wanted, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, b""
        except OSError:
            return 0, b""

    with subprocess.Popen([sys.executable, "-c", fetch_pod.COMMAND], env=env) as pod:
        try:
            wait_for(lambda: ask("list?folder=model")[0] == 200, "its server")
            assert [name for name, *_ in json.loads(ask("list?folder=model")[1])] == ["model/m"]
            assert ask("file?name=model/m", Range="bytes=4-") == (206, b"456789")
            assert {ask("list?folder=model", "other")[0], ask("file?name=model/m", "")[0]} == {403}
            for name in ("model/link", "model/../../secret", "../secret", str(tmp_path / "secret")):
                assert ask(f"file?name={name}") == (404, b""), name
        finally:
            pod.kill()
    job = made(*CASES["claims"]).job
    job["metadata"]["uid"] = "0-1"
    found = fetch_pod.build_pod(job, "fetch", "/data/out/golden-run", "5" * 64)
    assert all(mount["readOnly"] for mount in found["spec"]["containers"][0]["volumeMounts"])
    assert [volume["persistentVolumeClaim"]["claimName"] for volume in found["spec"]["volumes"]] == ["shared", "sets"]
    import kubernetes_validate

    kubernetes_validate.validate(found, RELEASES[-1], strict=True)
