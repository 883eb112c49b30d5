"""Jobs as custom jobs: golden requests, each read by the message classes of Google's SDK; limits with the field named."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from pydantic import ValidationError

from cloudtrain.backends import fetch_program, machines
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.plan import Plan
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.backends.vertex.options import VertexOptions
from cloudtrain.backends.vertex.raw import _walk
from cloudtrain.backends.vertex.request import Request
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle, File

GOLDEN = Path(__file__).parents[2] / "golden" / "vertex"
PLACE = {"project": "my-project", "region": "us-central1", "bucket": "my-bucket"}
SHARED = "projects/my-project"
REDUCTION_SERVER = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
CASES = {
    "cpu_one_node": ({}, {}),
    "l4_two_nodes": ({"num_nodes": 2, "resources": {"accelerators": "L4:4"}}, {}),
    "a100_80gb_spot": ({"num_nodes": 4, "resources": {"accelerators": "A100-80GB:8", "use_spot": True}}, {}),
    "a100_40gb": ({"resources": {"accelerators": "A100-40GB"}}, {}),
    "h100_spot_small": ({"resources": {"accelerators": "H100:2", "use_spot": True}}, {}),
    "h100_priced": ({"num_nodes": 2, "resources": {"accelerators": "H100:8"}}, {}),
    "h200_reserved": (
        {"resources": {"accelerators": "H200:8", "disk_gb": 500}},
        {"reservations": [f"{SHARED}/zones/us-central1-a/reservations/mine"], "disk_type": "pd-balanced"},
    ),
    "v100_on_n1": ({"resources": {"accelerators": "V100:8", "cpus": 90}}, {}),
    "unknown_machine": (
        {"resources": {"instance_type": "a9-ultra-16g", "accelerators": "X900:16"}},
        {"accelerator_type": "NVIDIA_B200"},
    ),
    "flex_start": (
        {"resources": {"accelerators": "B200:8"}, "limits": {"max_runtime": "7d", "max_wait": "2h"}},
        {"strategy": "FLEX_START"},
    ),
    "everything": (
        {
            "num_nodes": 3,
            "resources": {"accelerators": "L4:1", "disk_gb": 200},
            "labels": {"team": "nlp", "user": "me"},
            "inputs": {"train": {"uri": "gs://data/train/", "mode": "mount"}, "more": "gs://data/more/"},
            "output": "gs://results/here/",
            "retry": {"max_attempts": 3},
            "image": "europe-docker.pkg.dev/my-project/images/train:1",
        },
        {
            "service_account": "train@my-project.iam.gserviceaccount.com",
            "network": "projects/123456789/global/networks/default",
            "kms_key": f"{SHARED}/locations/us-central1/keyRings/ring/cryptoKeys/key",
            "tensorboard": f"{SHARED}/locations/us-central1/tensorboards/42",
            "web_access": True,
            "persistent_resource": "my-machines",
            "raw": {
                "jobSpec": {
                    "enableDashboardAccess": True,
                    "workerPoolSpecs": [{}, {"diskSpec": {"bootDiskType": "pd-standard"}}],
                },
            },
        },
    ),
    "private_connect": ({"retry": {"max_attempts": 3}}, {"network_attachment": "my-attachment"}),
}


def made(changes: dict, options: dict, attempt: int = 1) -> Request:
    data = {"name": "golden", "source": "/", "entrypoint": "train.py", "image": "img:1", "args": ["--tag", "a b"]}
    job = Job.from_dict({**data, **changes})
    bundle = Bundle(Path("x.tar.gz"), "5" * 64, "6" * 64, 1234, (File("train.py", 1, 0o644),), None, False, "/")
    return Request(job, bundle, "golden-run", attempt, {**PLACE, **options}, "vertex")


def test_one_image_for_all_jobs_is_the_targets():
    assert "image" in {problem.path for problem in made({"image": None}, {}).problems}
    pools = made({"image": None}, {"image": "targets:1"}).custom_job["jobSpec"]["workerPoolSpecs"]
    assert pools[0]["containerSpec"]["imageUri"] == "targets:1"


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str):
    from google.cloud import aiplatform_v1

    built = made(*CASES[case])
    assert built.problems == []
    message = aiplatform_v1.CustomJob.from_json(json.dumps(built.custom_job))  # unknown fields and enum names raise
    pools = message.job_spec.worker_pool_specs
    assert [pool.replica_count for pool in pools] == (
        [1, built.manifest.nodes - 1] if built.manifest.nodes > 1 else [1]
    )
    pieces = {item.name: item.value for item in pools[-1].container_spec.env}
    numbered = [
        pieces[f"CLOUDTRAIN_MANIFEST_{n}"] for n in range(sum(name[:20] == "CLOUDTRAIN_MANIFEST_" for name in pieces))
    ]
    assert Manifest.decode(numbered) == built.manifest
    text = json.dumps({**built.to_dict(), "price": built.price, "notes": built.notes}, indent=2)
    for piece in numbered:
        text = text.replace(piece, "${manifest}")
    text = text.replace(json.dumps(fetch_program.LAUNCH), '"${bootstrap}"') + "\n"
    golden = GOLDEN / f"{case}.json"
    if os.environ.get("CLOUDTRAIN_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("us-cental1", "us-central1"), ("europe-wets4", "europe-west4"), ("us-east9", ""), ("mars-central1", "")],
)
def test_a_mistyped_region_is_refused_and_a_new_one_is_not(typed: str, meant: str):
    """Google opens regions after the list was written."""
    refused = (
        pytest.raises(ValidationError, match=f'"{typed}" is no region of Google Cloud') if meant else nullcontext()
    )
    with refused as found:
        assert VertexOptions(**PLACE | {"region": typed}).region == typed
    assert not meant or f"did you mean {meant}?" in str(found.value.errors())


def test_every_machine_of_the_table_has_a_name_that_the_api_knows():
    from google.cloud.aiplatform_v1.types import AcceleratorType

    table = machines.load("vertex")
    assert len(table) > 50
    for machine in table:
        if machine.accelerators:
            assert machine.more["accelerator_type"] in AcceleratorType.__members__, machine
        else:
            assert machine.more["accelerator_type"] == "" == machine.accelerator


@pytest.mark.parametrize(
    ("changes", "options", "path"),
    [
        ({"resources": {"accelerators": "A100-80GB:3"}}, {}, "resources.accelerators"),
        ({"resources": {"accelerators": "H100:2"}}, {}, "resources.accelerators"),  # Spot only
        ({"resources": {"instance_type": "a3-ultragpu-8g"}}, {}, "resources.instance_type"),
        ({"resources": {"instance_type": "a4x-highgpu-4g"}}, {"strategy": "FLEX_START"}, "resources.instance_type"),
        ({"resources": {"instance_type": "a9-highgpu-8g"}}, {}, "resources.accelerators"),  # nothing says which GPUs
        ({"resources": {"accelerators": "L4:1", "instance_type": "g2-standard-48"}}, {}, "resources.accelerators"),
        ({"resources": {"accelerators": "X9:1", "instance_type": "x9-1g"}}, {}, "options.vertex.accelerator_type"),
        ({"resources": {"disk_gb": 99}}, {}, "resources.disk_gb"),
        ({"labels": {"Team": "x"}}, {}, "labels.Team"),
        ({"labels": {"team": "N L P"}}, {}, "labels.team"),
        ({"labels": {f"l{n}": "x" for n in range(63)}}, {}, "labels"),
        ({"limits": {"max_runtime": "31d"}}, {}, "limits.max_runtime"),
        ({"limits": {"max_runtime": "8d"}}, {"strategy": "FLEX_START"}, "limits.max_runtime"),
        ({"output": "s3://bucket/x"}, {}, "output"),
        ({"inputs": {"a": {"uri": "s3://b/x", "mode": "mount"}}}, {}, "inputs.a.mode"),
        ({"inputs": {"a": "https://host/x"}}, {}, "inputs.a.uri"),
        ({"resources": {"use_spot": True}}, {"strategy": "STANDARD"}, "options.vertex.strategy"),
        (
            {"resources": {"use_spot": True}},
            {"reservations": ["projects/p/zones/z/reservations/r"]},
            "options.vertex.reservations",
        ),
        ({}, {"reservations": ["mine"]}, "options.vertex.reservations"),
        ({"limits": {"max_wait": "0"}}, {"strategy": "FLEX_START"}, "limits.max_wait"),
        ({}, {"network": "projects/my-project/global/networks/default"}, "options.vertex.network"),
        ({}, {"tensorboard": "projects/p/locations/us-central1/tensorboards/1"}, "options.vertex.service_account"),
        (
            {},
            {"tensorboard": "projects/p/locations/europe-west4/tensorboards/1", "service_account": "a@b"},
            "options.vertex.tensorboard",
        ),
        (
            {},
            {"network": "projects/1/global/networks/n", "network_attachment": "a"},
            "options.vertex.network_attachment",
        ),
        ({"args": [os.urandom(90_000).hex()]}, {}, "args"),
    ],
)
def test_what_the_platform_would_refuse_is_a_problem_of_its_field(changes: dict, options: dict, path: str):
    assert [problem.path for problem in made(changes, options).problems] == [path]


PAGE = (Path(__file__).parents[3] / "docs" / "vertex_recipes.md").read_text("utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
RECIPES = dict(zip(re.findall(r"^## (.+)$", PAGE, re.MULTILINE), BLOCKS, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_request_of_the_sdk(name: str):
    """The SDK's own classes, which its CustomJob takes, say the same as a recipe of the page."""
    from google.cloud import aiplatform_v1 as v1
    from google.cloud.aiplatform.utils.worker_spec_utils import _DistributedTrainingSpec

    changes = dict(RECIPES[name])
    built = made(changes, changes.pop("options")["vertex"])
    assert built.problems == []
    planned = v1.CustomJob.from_json(json.dumps(built.custom_job))
    sdk = v1.CustomJob.from_json(json.dumps(made(changes, {}).custom_job))
    plain, spec = v1.CustomJob(sdk), sdk.job_spec
    if name == "Reduction server":
        given = {"reduction_server_replica_count": 2, "reduction_server_machine_type": "n1-highcpu-16"}
        distributed = _DistributedTrainingSpec.chief_worker_pool(replica_count=2, machine_type="a3-highgpu-8g", **given)
        (*_, server) = distributed.pool_specs
        server["container_spec"] = {"image_uri": REDUCTION_SERVER}
        spec.worker_pool_specs.append(v1.WorkerPoolSpec(server))
    elif name == "NFS share":
        spec.psc_interface_config = v1.PscInterfaceConfig(network_attachment="my-attachment")
        for pool in spec.worker_pool_specs:
            pool.nfs_mounts = [v1.NfsMount(server="10.0.0.2", path="/data", mount_point="data")]
    elif name == "Persistent resource":
        spec.persistent_resource_id = "my-machines"
    else:
        spec.enable_dashboard_access = True
        dns = v1.DnsPeeringConfig(domain="my-corp.internal.", target_project="my-project", target_network="my-vpc")
        spec.psc_interface_config = v1.PscInterfaceConfig(network_attachment="my-attachment", dns_peering_configs=[dns])
    assert planned == sdk and planned != plain


def test_null_in_raw_leaves_a_field_out() -> None:
    """As in Google's JSON: the message is the same as without the field."""
    from google.cloud import aiplatform_v1 as v1

    job = {"num_nodes": 2, "resources": {"accelerators": "L4", "disk_gb": 200}}
    spec = {"workerPoolSpecs": [{"diskSpec": None}], "serviceAccount": None, "scheduling": {"timeout": None}}
    built = made(job, {"service_account": "a@p.iam", "raw": {"jobSpec": spec, "encryptionSpec": None}})
    assert built.problems == []
    planned = v1.CustomJob.from_json(json.dumps(built.custom_job))
    assert not planned.job_spec.service_account and not planned.job_spec.scheduling.timeout
    assert [bool(pool.disk_spec.boot_disk_size_gb) for pool in planned.job_spec.worker_pool_specs] == [False, True]
    (problem,) = made(job, {"raw": {"jobSpec": {"workerPoolSpecs": [None]}}}).problems
    assert "workerPoolSpecs[0] to None, which is not an object" in problem.message


@pytest.mark.parametrize(("most", "options"), [("30d", {}), ("7d", {"strategy": "FLEX_START"})])
def test_the_longest_time_includes_what_is_added_or_says_that_less_is(most: str, options: dict) -> None:
    resources = {"accelerators": "H200:8", "use_spot": not options}
    built = made({"resources": resources, "limits": {"max_runtime": most}}, options)
    days = int(most[:-1])
    assert built.problems == [] and built.custom_job["jobSpec"]["scheduling"]["timeout"] == f"{days * 86400}s"
    assert [note for note in built.notes if f"for {days} days at most: less time is added" in note]


def test_raw_is_checked_with_an_older_protobuf() -> None:
    """Fields have no `is_repeated` there (protobuf 5.29)."""
    text = SimpleNamespace(message_type=None, enum_type=None, cpp_type=9, CPPTYPE_STRING=9, CPPTYPE_BOOL=7)
    one, many = ({"name": n, "json_name": n, "label": label, "LABEL_REPEATED": 3} for n, label in (("a", 1), ("b", 3)))
    fields = [SimpleNamespace(**vars(text), **each) for each in (one, many)]
    kind = SimpleNamespace(full_name="google.Kind", name="Kind", fields=fields)
    assert list(_walk({"a": "x", "b": ["y"]}, kind, "")) == []
    assert [message for message, _ in _walk({"a": ["x"], "b": "y"}, kind, "")] == [
        "sets a to ['x'], which is not a text",
        "sets b to 'y', which is not a list",
    ]


@pytest.mark.parametrize(
    ("spec", "said", "hint"),
    [
        ({"enableDashbordAccess": True}, "jobSpec.enableDashbordAccess", "did you mean enableDashboardAccess?"),
        ({"scheduling": {"strategy": "FLEXSTART"}}, "jobSpec.scheduling.strategy to 'FLEXSTART'", "FLEX_START"),
        ({"scheduling": {"timeout": "2h"}}, "jobSpec.scheduling.timeout to '2h', which is not a duration", '"3600s"'),
        ({"scheduling": {"timeout": 3600}}, "which is not a duration", '"3600s"'),
        ({"workerPoolSpecs": [{"replicaCount": "many"}]}, "workerPoolSpecs[0].replicaCount", "a number"),
        ({"workerPoolSpecs": [{"nfsMounts": {"server": "10.0.0.2"}}]}, "which is not a list", "as a list"),
        (
            {"workerPoolSpecs": [{"machineSpec": {"acceleratorType": "NVIDIA_H100"}}]},
            "acceleratorType",
            "NVIDIA_H100_80GB?",
        ),
        ({"enableWebAccess": "yes"}, "which is not true or false", "true or false"),
        ({"serviceAccount": 7}, "which is not a text", "a text"),
        ({"scheduling": "soon"}, "which is not an object", "Scheduling"),
    ],
)
def test_raw_is_checked_by_the_messages_of_the_sdk(spec: dict, said: str, hint: str):
    built = made({"resources": {"accelerators": "L4"}}, {"raw": {"jobSpec": spec}})
    (problem,) = built.problems
    assert problem.path == "options.vertex.raw" and said in problem.message and hint in problem.hint, problem
    from google.cloud import aiplatform_v1
    from google.protobuf.json_format import ParseError

    if said != "which is not a text":  # taken by the parser, and refused by the service
        with pytest.raises(ParseError):
            aiplatform_v1.CustomJob.from_json(json.dumps(built.custom_job))


def test_a_machine_type_alone_is_enough():
    named = made({"num_nodes": 2, "resources": {"instance_type": "a3-highgpu-8g"}}, {})
    both = made({"num_nodes": 2, "resources": {"instance_type": "a3-highgpu-8g", "accelerators": "H100:8"}}, {})
    assert named.problems == [] and "8 ranks run on each node" in named.notes[0]
    assert named.custom_job["jobSpec"]["workerPoolSpecs"][0]["machineSpec"] == {
        "machineType": "a3-highgpu-8g",
        "acceleratorType": "NVIDIA_H100_80GB",
        "acceleratorCount": 8,
    }
    assert named.manifest.gpus_per_node == named.manifest.processes_per_node == 8
    assert named.custom_job["jobSpec"]["scheduling"] == both.custom_job["jobSpec"]["scheduling"]
    cpus = made({"resources": {"instance_type": "n1-standard-8"}}, {})
    assert cpus.problems == [] and cpus.manifest.gpus_per_node == 0


@pytest.mark.parametrize("name", ["ct5lp-hightpu-4t", "ct6e-standard-8t", "tpu7x-standard-4t"])
def test_tpus_are_refused(name: str):
    (problem,) = made({"resources": {"instance_type": name}}, {}).problems
    assert problem.path == "resources.instance_type" and problem.message.startswith("TPUs need torch_xla")


@pytest.mark.parametrize(
    ("accelerators", "hint"),
    [
        ("H200:8", "options.vertex.strategy: FLEX_START"),
        ("B200:8", "options.vertex.strategy: FLEX_START"),
        ("GB200:4", "set options.vertex.reservations"),
        ("A10G:1", "the nearest here is L4, with 24 GB (A10G has 24 GB)"),
        ("L40S:1", "the nearest here is A100-40GB, with 40 GB (L40S has 48 GB)"),
        ("B300:8", "B200, GB200"),
        ("MI300X:8", "the nearest here is GB200, with 186 GB (MI300X has 192 GB)"),
        ("NVIDIA-H20:8", "the nearest here is RTX-PRO-6000, with 96 GB (NVIDIA-H20 has 96 GB)"),
        ("K80:1", "the nearest here is T4, with 16 GB (K80 has 12 GB)"),  # P4 is as near, and has no known price
    ],
)
def test_a_hint_names_what_there_is(accelerators: str, hint: str):
    (problem,) = made({"resources": {"accelerators": accelerators}}, {}).problems
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a3-ultragpu-8g", {"strategy": "FLEX_START"}),
        ("a4-highgpu-8g", {"persistent_resource": "mine"}),
        ("a4x-highgpu-4g", {"reservations": ["projects/p/zones/z/reservations/r"]}),
    ],
)
def test_a_machine_that_is_not_on_demand_is_taken_where_the_job_asks_for_its_capacity(name: str, options: dict):
    assert made({"resources": {"instance_type": name}}, options).problems == []


def test_services_are_a_pool_of_their_own_machines():
    server = {"run": "serve", "num_nodes": 2, "resources": {"instance_type": "g2-standard-12"}}
    roles = {"trainer": {}, "server": server}
    changes = {"resources": {"accelerators": "H100:8", "disk_gb": 500, "use_spot": True}, "roles": roles}
    request = made(changes, {})
    main, others = request.custom_job["jobSpec"]["workerPoolSpecs"]
    assert (main["machineSpec"]["machineType"], main["diskSpec"]["bootDiskSizeGb"]) == ("a3-highgpu-8g", 500)
    assert (others["machineSpec"]["machineType"], others["replicaCount"]) == ("g2-standard-12", 2)
    assert "diskSpec" not in others and others["containerSpec"] == main["containerSpec"]
    assert [role.get("gpus_per_node") for role in request.manifest.roles] == [None, 1]
    assert request.price is None, "that of a3-highgpu-8g is known, but not that of the others"
    backend, plan = (
        VertexBackend(PLACE, Path("/")),
        Plan("vertex", "r", 1, {"customJob": request.custom_job}, {}, {"roles": 1}, {}),
    )
    assert backend.machine(plan) == "", "a list's price of the first machine is not that of all"
    server["resources"] = {"instance_type": "a3-highgpu-8g"}
    usd = machines.find_machine(machines.load("vertex"), "a3-highgpu-8g").price["usd_per_hour"]
    assert made(changes, {}).price["usd_per_hour"] == round(3 * usd, 6)
    server["resources"] = {"accelerators": "X900"}
    assert [problem.path for problem in made(changes, {}).problems] == ["roles.server.resources.accelerators"]
    server["resources"] = {}
    roles["trainer"]["num_nodes"] = 2
    assert [problem.path for problem in made(changes, {}).problems] == ["roles.server.resources"]


def test_services_have_an_image_of_their_own():
    roles = {"trainer": {}, "server": {"run": "serve", "image": "registry/vllm:1"}}
    changes = {"resources": {"instance_type": "g2-standard-12"}, "image": "registry/train:1", "roles": roles}
    request = made(changes, {})
    main, others = request.custom_job["jobSpec"]["workerPoolSpecs"]
    assert request.problems == [] and others["machineSpec"] == main["machineSpec"]
    assert (main["containerSpec"].pop("imageUri"), others["containerSpec"].pop("imageUri")) == (
        "registry/train:1",
        "registry/vllm:1",
    )
    assert others["containerSpec"] == main["containerSpec"] and request.manifest.gpus_per_node == 1
    roles["judge"] = {"run": "judge"}
    assert [problem.path for problem in made(changes, {}).problems] == ["roles.server.image"]


def test_all_problems_at_once():
    built = made({"labels": {"A": "b"}, "output": "s3://x/y", "resources": {"disk_gb": 1}}, {"kms_key": "mine"})
    assert {p.path for p in built.problems} == {"labels.A", "output", "resources.disk_gb", "options.vertex.kms_key"}


# -- the command of the container -------------------------------------------------------------------------------------


def bundled(folder: Path, launcher: str) -> str:
    """Write a bundle of one launcher and return the digest of the tar in it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        member = tarfile.TarInfo(".cloudtrain/launch.py")
        member.size = len(launcher)
        tar.addfile(member, io.BytesIO(launcher.encode()))
    folder.mkdir(parents=True)
    (folder / "x.tar.gz").write_bytes(gzip.compress(stream.getvalue()))
    return hashlib.sha256(stream.getvalue()).hexdigest()


def test_the_bootstrap_reads_through_the_mount(tmp_path: Path):
    digest = bundled(tmp_path / "gcs" / "bucket" / "src", "import os, sys; print(os.getcwd()); sys.exit(41)")
    env = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "CLOUDTRAIN_GCS_MOUNT": str(tmp_path / "gcs"),
        "CLOUDTRAIN_ATTEMPT_ID": "run-a1",
        fetch_program.SOURCE: "gs://bucket/src/x.tar.gz",
        fetch_program.DIGEST: digest,
    }
    command = [sys.executable, "-c", fetch_program.LAUNCH]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (41, str(tmp_path / "cloudtrain" / "run-a1" / "source")), (
        done.stderr
    )


def test_a_sharded_strategy_takes_several_nodes():
    changes = {"entrypoint": None, "args": [], "num_nodes": 2, "parallelism": {"strategy": "fsdp"}}
    assert made(changes, {}).problems == []
