"""CreateTrainingJob requests: golden files, an oracle that is not ours, and every limit named by its field."""

from __future__ import annotations

import base64
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.sagemaker import client, fields, limits, machine, request
from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.backends.sagemaker.hyperparameters import TORCHRUN
from cloudtrain.backends.sagemaker.policy import _Needs
from cloudtrain.errors import MissingExtra
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner
from tests.backends.sagemaker.oracle import violations

GOLDEN = Path(__file__).parents[2] / "golden" / "sagemaker"
ACCOUNT = {
    "role": "arn:aws:iam::123456789012:role/training",
    "bucket": "my-bucket",
    "prefix": "cloudtrain",
    "region": "us-east-1",
}
SHA = "5f" * 32
HOSTILE = ["", "two words", "$HOME `id`", "line\nbreak", "ünïcödé 🚀", "'\"\\", "-x", "x" * 3000]

CASES = {
    "user_script": ({"resources": {"accelerators": "A10G"}}, {}),
    "two_nodes_efa": (
        {
            "num_nodes": 2,
            "resources": {"accelerators": "H100:8", "disk_gb": 500},
            "labels": {"team": "nlp", "commit": "0123abc"},
            "metrics": {"loss": "loss=([0-9.]+)", "named": "(?P<value>[0-9.]+)"},
        },
        {"encrypt_traffic": True},
    ),
    "spot": (
        {
            "resources": {"accelerators": "A100:8", "use_spot": True},
            "limits": {"max_runtime": "4h"},
            "output": "s3://other-bucket/results",
        },
        {"max_wait": "12h"},
    ),
    "vpc_and_keys": (
        {"image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1", "resources": {"cpus": 8, "memory": "30GB"}},
        {
            "subnets": ["subnet-1", "subnet-2"],
            "security_groups": ["sg-1"],
            "kms_key": "arn:aws:kms:us-east-1:123456789012:key/abc",
            "volume_kms_key": "alias/disk",
            "isolate": True,
            "keep_alive_s": 600,
        },
    ),
    "inputs": (
        {
            "resources": {"accelerators": "L4"},
            "inputs": {
                "train": "s3://data/train",
                "file": "s3://data/one/x.jsonl",
                "big": {"uri": "s3://data/big/", "mode": "mount"},
                "web": {"uri": "hf://datasets/x", "mode": "stream"},
            },
        },
        {"shard": ["train"]},
    ),
    "toolkit": ({"resources": {"accelerators": "L4"}, "image": "my/image:1"}, {"entry": "toolkit"}),
    "distribution": (
        {"num_nodes": 2, "resources": {"accelerators": "L4"}, "image": "my/image:1"},
        {"entry": "toolkit", "distribution": {"torch_distributed": {"enabled": True}}},
    ),
    "instance_groups": (
        {"num_nodes": 3, "metrics": {"loss": "loss=([0-9.]+)"}},
        {
            "instance_groups": [
                {"name": "first", "instance_type": "ml.g5.12xlarge", "count": 1},
                {"name": "others", "instance_type": "ml.g5.24xlarge", "count": 2},
            ],
        },
    ),
    "roles": (
        {
            "roles": {
                "trainer": {"num_nodes": 2, "resources": {"instance_type": "ml.p4d.24xlarge"}, "after": ["server"]},
                "server": {"run": "serve", "resources": {"accelerators": "L4"}, "ready": "tcp://:8000"},
                "judge": {"run": "judge", "resources": {"cpus": 4}},
            },
        },
        {},
    ),
    "file_systems": (
        {
            "resources": {"accelerators": "L4"},
            "inputs": {
                "lustre": "fsx://fs-0123456789abcdef0/abcdefgh/data",
                "nfs": "efs://fs-01234567/",
                "p": "s3://b/p/",
            },
            "image": "registry.corp:5000/train:1",
        },
        {
            "subnets": ["subnet-1"],
            "security_groups": ["sg-1"],
            "pipe": ["p"],
            "private_registry": True,
            "registry_credentials": "arn:aws:lambda:us-east-1:123456789012:function:login",
        },
    ),
    "large_job": (
        {"resources": {"accelerators": "H100:8"}},
        {
            "training_plan": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/big",
            "experiment": {"name": "tuning", "trial": "one", "display_name": "a", "run": "r"},
            "remote_debug": True,
            "infra_check": True,
            "session_chaining": True,
            "compress": False,
            "raw": {
                "ResourceConfig": {"InstancePlacementConfig": {"EnableMultipleJobs": True}},
                "Environment": {"A": "b"},
            },
        },
    ),
    "channels": (
        {
            "resources": {"accelerators": "L4"},
            "limits": {"max_runtime": "28d"},
            "inputs": {
                "train": "s3://data/train.manifest",
                "texts": "s3://data/texts/",
                "labelled": {"uri": "s3://data/labelled.manifest"},
            },
        },
        {
            "shard": ["texts"],
            "pipe": ["labelled"],
            "raw": {
                "InputDataConfig": [
                    {"ChannelName": "train", "DataSource": {"S3DataSource": {"S3DataType": "ManifestFile"}}},
                    {
                        "ChannelName": "texts",
                        "ContentType": "text/csv",
                        "CompressionType": "Gzip",
                        "ShuffleConfig": {"Seed": 7},
                    },
                    {
                        "ChannelName": "labelled",
                        "RecordWrapperType": "RecordIO",
                        "DataSource": {
                            "S3DataSource": {
                                "S3DataType": "AugmentedManifestFile",
                                "AttributeNames": ["source", "label"],
                            }
                        },
                    },
                ],
                "CheckpointConfig": {"S3Uri": "s3://earlier/checkpoints"},
            },
        },
    ),
    "boto3_only": (
        {"resources": {"accelerators": "L4"}},
        {
            "max_pending": "2h",
            "raw": {"MlflowConfig": {"MlflowResourceArn": "arn:aws:sagemaker:us-east-1:123456789012:mlflow-app/x"}},
        },
    ),
    "hyperparameters": (
        {
            "resources": {"accelerators": "L4"},
            "hyperparameters": {
                "epochs": 1,
                "lr": 5e-5,
                "model": "distil",
                "fp16": True,
                "layers": [2, 4],
                "exact": "0.10",
            },
        },
        {},
    ),
}


def job(**changes) -> Job:
    data = {"name": "golden", "source": "/src", "entrypoint": "train.py", "environment": {"requirements": "none"}}
    return Job.from_dict({**data, **changes})


def made(changes: dict | None = None, options: dict | None = None) -> request.BuiltRequest:
    return request.build_request(job(**(changes or {})), "golden-run", 1, SHA, {**ACCOUNT, **(options or {})})


@pytest.mark.parametrize("name", CASES)
def test_golden_request(name: str) -> None:
    built = made(*CASES[name])
    assert built.problems == ()
    assert violations(built.request) == []
    orders_of(built)  # they can be read; the golden file stays readable without them
    request = {
        **built.request,
        "HyperParameters": {
            name: "${manifest}" if name.startswith("ct_manifest_") else text
            for name, text in built.request["HyperParameters"].items()
        },
    }
    shown = {"request": request, "inputs": built.manifest.inputs, "notes": built.notes, "price": built.price}
    text = json.dumps(shown, indent=2, ensure_ascii=False) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("CLOUDTRAIN_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def orders_of(built: request.BuiltRequest):
    """Read the orders as the launcher does, from the file that SageMaker makes of the hyperparameters."""
    from launcher import manifest

    return manifest.decode(manifest.pieces({}, json.dumps(built.request["HyperParameters"])))


@pytest.mark.parametrize("name", ["spot", "vpc_and_keys"])
def test_the_limit_of_spot_machines_says_that_it_counts_the_wait(name: str) -> None:
    about = {"manifest": {"max_runtime_s": 3600}, "job": {"retry": {"max_attempts": 1}}, "retries": "platform"}
    plan = SimpleNamespace(request=made(*CASES[name]).request, **about)
    note = limits.time_limit(plan).note  # type: ignore[arg-type]
    assert ("the wait for spot machines is counted, which is not billed" in note) == (name == "spot")


def test_the_longest_time_of_an_attempt_is_added_up() -> None:
    spot = {"accelerators": "A10G", "use_spot": True}
    built = made({"resources": spot, "limits": {"max_runtime": "2h", "max_wait": "30m"}})
    about = {"manifest": {"max_runtime_s": 7200}, "job": {"retry": {"max_attempts": 3}}, "retries": "platform"}
    limit = limits.time_limit(SimpleNamespace(request=built.request, **about))  # type: ignore[arg-type]
    assert limit.seconds == 2 * 3600 + (15 + 30 + 2 + 10) * 60
    assert limit.parts == (
        "the 2h 57m of an attempt are 2h of limits.max_runtime + 15m that cloudtrain adds for downloads and the last"
        " checkpoint + 30m of waiting for spot machines + 2m to stop + 10m to upload results;"
        " SageMaker's own retries share it: the 3 attempts cost as one"
    )


@pytest.mark.parametrize(
    ("options", "cap", "said"),
    [
        (
            {"max_wait": "4h"},
            {},
            "limits.max_wait has no effect: options.sagemaker.max_wait, the deadline, goes before it",
        ),
        (
            {},
            {"max_total_runtime": "4h"},
            "limits.max_wait (30m) adds nothing to the deadline under limits.max_total_runtime",
        ),
        ({}, {"max_cost": "9 USD"}, "limits.max_wait (30m) adds nothing to the deadline under limits.max_cost"),
    ],
)
def test_a_wait_that_adds_nothing_is_said(options: dict, cap: dict, said: str) -> None:
    spot = {"accelerators": "A10G", "use_spot": True}
    built = made({"resources": spot, "limits": {"max_runtime": "2h", "max_wait": "30m", **cap}}, options)
    assert said in built.notes
    without = made({"resources": spot, "limits": {"max_runtime": "2h", **cap}}, options)
    assert not any("limits.max_wait" in note for note in without.notes)


def test_arguments_of_any_kind_arrive_through_hyperparameters() -> None:
    built = made({"args": [*HOSTILE, *(f"{n:x}" * 40 for n in range(2000))], "resources": {"accelerators": "T4"}})
    assert violations(built.request) == [] and built.problems == ()
    assert len(built.request["HyperParameters"]) > 1
    assert orders_of(built).argv[1 : len(HOSTILE) + 1] == HOSTILE


def test_the_containers_command_fits_and_is_python() -> None:
    compile(request.UNPACK, "unpack", "exec")
    assert len(request.UNPACK) <= limits.MAX_ARGUMENT


def test_a_job_without_gpus_and_image_gets_both_ways() -> None:
    built = made({"image": None, "resources": {"cpus": 4}})
    (problem,) = [problem for problem in built.problems if problem.path == "image"]
    assert "for GPUs only" in problem.message and problem.hint.startswith("add --gpus A10G:1, or set image: ")


def test_a_machine_with_gpus_gives_its_ranks() -> None:
    built = made({"resources": {"instance_type": "ml.g5.12xlarge"}})
    assert (orders_of(built).gpus_per_node, orders_of(built).processes_per_node) == (4, 4)
    assert orders_of(built).parallelism["strategy"] == "ddp"


def test_a_newer_type_is_allowed_with_a_note() -> None:
    built = made({"resources": {"instance_type": "ml.p9.48xlarge", "accelerators": "X100:8"}})
    assert built.problems == () and "not in cloudtrain" in built.notes[0] and built.price is None
    assert built.request["ResourceConfig"]["InstanceType"] == "ml.p9.48xlarge"


def test_a_type_that_nobody_knows_is_not_taken_for_a_cpu() -> None:
    (problem,) = [p for p in made({"resources": {"instance_type": "ml.p9.48xlarge"}}).problems if p.path != "image"]
    assert problem.path == "resources.accelerators" and "ml.p9.48xlarge" in problem.message
    built = made({"resources": {"instance_type": "ml.m9i.large"}, "image": "my/image:1"})
    assert built.problems == () and "not in cloudtrain" in built.notes[0]


PRINTED = [  # a line, and the losses that SageMaker's charts find in it
    ('::cloudtrain:: {"event":"metric","step":3,"loss":0.25,"eval_loss":2.5}', "0.25"),
    ("{'loss': 0.25, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 1.0}", "0.25"),
    ("{'loss': '0.25', 'grad_norm': '1.5'}", "0.25"),
    ("loss=1e-3 step=5", "1e-3"),
    ("step 5 | loss: 2.5E+01", "2.5E+01"),
    ("{'eval_loss': 2.5, 'train_loss': 1.5}", None),
    ("the loss: none", None),
]


@pytest.mark.parametrize(("line", "value"), PRINTED)
def test_the_charts_of_sagemaker_show_what_scripts_print(line: str, value: str | None) -> None:
    (pattern,) = [
        m["Regex"] for m in made(GPU).request["AlgorithmSpecification"]["MetricDefinitions"] if m["Name"] == "loss"
    ]
    found = re.search(pattern, line)
    assert (found[1] if found else None) == value


def test_nodes_make_the_price() -> None:
    one, four = (made({"num_nodes": n, "resources": {"accelerators": "A100:8"}}).price for n in (1, 4))
    assert four["usd_per_hour"] == pytest.approx(4 * one["usd_per_hour"]) and one["as_of"] and one["source"]


# One case for each limit: what is wrong, and the field under which a person looks for it.
GPU = {"resources": {"accelerators": "A10G"}}
FOUR = {"name": "a", "instance_type": "ml.g5.12xlarge", "count": 2}
LIMITS = {
    "role missing": ({}, {"role": None}, "options.sagemaker.role"),
    "role no arn": ({}, {"role": "training"}, "options.sagemaker.role"),
    "role long": ({}, {"role": ACCOUNT["role"] + "x" * 2048}, "options.sagemaker.role"),
    "bucket missing": ({}, {"bucket": None}, "options.sagemaker.bucket"),
    "bucket name": ({}, {"bucket": "My_Bucket"}, "options.sagemaker.bucket"),
    "kms": ({}, {"kms_key": "a b"}, "options.sagemaker.kms_key"),
    "volume kms": (
        {"resources": {"accelerators": "V100:1"}},
        {"volume_kms_key": "k" * 2049},
        "options.sagemaker.volume_kms_key",
    ),
    "subnets": ({}, {"subnets": ["s"] * 17, "security_groups": ["g"]}, "options.sagemaker.subnets"),
    "groups": ({}, {"subnets": ["s"], "security_groups": ["g"] * 6}, "options.sagemaker.security_groups"),
    "subnet name": ({}, {"subnets": ["s_1"], "security_groups": ["g"]}, "options.sagemaker.subnets"),
    "python": ({}, {"python": "p" * 257}, "options.sagemaker.python"),
    "image long": ({"image": "i" * 256}, {}, "image"),
    "tags": ({"labels": {f"l{n}": "x" for n in range(49)}}, {}, "labels"),
    "tag key": ({"labels": {"k" * 129: "x"}}, {}, f"labels.{'k' * 40}"),
    "tag value": ({"labels": {"k": "v" * 257}}, {}, "labels.k"),
    "tag letters": ({"labels": {"k": "a;b"}}, {}, "labels.k"),
    "tag aws": ({"labels": {"aws:x": "y"}}, {}, "labels.aws:x"),
    "channels": ({"inputs": {f"i{n}": "s3://b/k/" for n in range(20)}}, {}, "inputs"),
    "channel name": ({"inputs": {"cloudtrain": "s3://b/k/"}}, {}, "inputs.cloudtrain"),
    "channel uri": ({"inputs": {"a": f"s3://b/{'k' * 1024}/"}}, {}, "inputs.a.uri"),
    "channel place": ({"inputs": {"a": "gs://b/k/"}}, {}, "inputs.a.uri"),
    "metrics": ({"metrics": {f"m{n}": "x=([0-9])" for n in range(37)}}, {}, "metrics"),
    "metric name": ({"metrics": {"m" * 256: "x=([0-9])"}}, {}, f"metrics.{'m' * 40}"),
    "metric regex": ({"metrics": {"m": f"{'x' * 500}([0-9])"}}, {}, "metrics.m"),
    "disk": ({"resources": {"accelerators": "A10G", "disk_gb": 16385}}, {}, "resources.disk_gb"),
    "runtime": ({"limits": {"max_runtime": "29d"}}, {}, "limits.max_runtime"),
    "retries": ({"retry": {"max_attempts": 32}}, {}, "retry.max_attempts"),
    "output": ({"output": "gs://b/k"}, {}, "output"),
    "output long": ({"output": f"s3://b/{'k' * 1024}"}, {}, "output"),
    "wait without spot": ({}, {"max_wait": "3h"}, "options.sagemaker.max_wait"),
    "wait short": (
        {"resources": {"accelerators": "A10G", "use_spot": True}},
        {"max_wait": "3h"},
        "options.sagemaker.max_wait",
    ),
    "warm spot": (
        {"resources": {"accelerators": "A10G", "use_spot": True}},
        {"keep_alive_s": 60},
        "options.sagemaker.keep_alive_s",
    ),
    "shard": ({}, {"shard": ["nothing"]}, "options.sagemaker.shard"),
    "pipe": ({}, {"pipe": ["nothing"]}, "options.sagemaker.pipe"),
    "pending": ({}, {"max_pending": "20m"}, "options.sagemaker.max_pending"),
    "registry": ({}, {"private_registry": True}, "options.sagemaker.private_registry"),
    "file system": ({"inputs": {"a": "efs://fs-01234567/x"}}, {}, "inputs.a.uri"),
    "nvme key": ({}, {"volume_kms_key": "alias/x"}, "options.sagemaker.volume_kms_key"),
    "groups' nodes": ({"resources": {}}, {"instance_groups": [FOUR]}, "num_nodes"),
    "groups and a type": (
        {"resources": {"instance_type": FOUR["instance_type"]}, "num_nodes": 2},
        {"instance_groups": [FOUR]},
        "resources.instance_type",
    ),
    "groups unlike": (
        {"resources": {}, "num_nodes": 3},
        {"instance_groups": [FOUR, {"name": "b", "instance_type": "ml.g5.xlarge", "count": 1}]},
        "options.sagemaker.instance_groups",
    ),
    "groups and roles": (
        {"resources": {}, "roles": {"trainer": {}, "server": {"run": "x", "resources": {"cpus": 9}}}},
        {"instance_groups": [FOUR]},
        "roles",
    ),
    "six groups": (
        {"roles": {"trainer": {}, **dict.fromkeys("abcde", {"run": "x", "resources": {"cpus": 9}})}},
        {},
        "roles",
    ),
    "a role's type": (
        {"roles": {"trainer": {}, "server": {"run": "x", "resources": {"instance_type": "p4d.24xlarge"}}}},
        {},
        "roles.server.resources.instance_type",
    ),
    "a role's disk": (
        {"roles": {"trainer": {}, "server": {"run": "x", "resources": {"disk_gb": 300}}}},
        {},
        "roles.server.resources.disk_gb",
    ),
    "distribution of ours": ({}, {"distribution": TORCHRUN}, "options.sagemaker.distribution"),
    "distribution by mpi": (
        {},
        {"entry": "toolkit", "distribution": {"mpi": {"enabled": True}}},
        "options.sagemaker.distribution",
    ),
    "distribution by smdistributed": (
        {},
        {"distribution": {"smdistributed": {"dataparallel": {"enabled": True}}}},
        "options.sagemaker.distribution",
    ),
    "distribution off": (
        {},
        {"entry": "toolkit", "distribution": {"torch_distributed": {"enabled": False}}},
        "options.sagemaker.distribution",
    ),
    "distribution and roles": (
        {"roles": {"trainer": {"num_nodes": 2}}},
        {"entry": "toolkit", "distribution": TORCHRUN},
        "roles",
    ),
    "distribution and setup": ({"setup": "true"}, {"entry": "toolkit", "distribution": TORCHRUN}, "setup"),
    "distribution of a command": (
        {"entrypoint": ["bash", "run.sh"]},
        {"entry": "toolkit", "distribution": TORCHRUN},
        "entrypoint",
    ),
    "raw name": ({}, {"raw": {"TrainingJobName": "x"}}, "options.sagemaker.raw"),
    "raw nested": ({}, {"raw": {"ResourceConfig": {"InstanceCount": 2}}}, "options.sagemaker.raw"),
    "raw channel": ({}, {"raw": {"InputDataConfig": [{"ChannelName": "x"}]}}, "options.sagemaker.raw"),
    "raw channel type": (
        {"inputs": {"a": "s3://b/a/"}},
        {"raw": {"InputDataConfig": [{"ChannelName": "a", "Contents": "text/csv"}]}},
        "options.sagemaker.raw",
    ),
    "raw channels by name": (
        {"inputs": {"a": "s3://b/a/"}},
        {"raw": {"InputDataConfig": {"a": {"ContentType": "text/csv"}}}},
        "options.sagemaker.raw",
    ),
    "raw channel source": (
        {"inputs": {"a": "s3://b/a/"}},
        {"raw": {"InputDataConfig": [{"ChannelName": "a", "DataSource": "s3://b/c/"}]}},
        "options.sagemaker.raw",
    ),
    "raw typo": ({}, {"raw": {"ResourceConfg": {}}}, "options.sagemaker.raw"),
    "raw type": ({}, {"raw": {"ProfilerConfig": {"DisableProfiler": "no"}}}, "options.sagemaker.raw"),
    "sdk cannot": ({}, {"client": "sdk", "max_pending": "2h"}, "options.sagemaker.client"),
    "pip without network": (
        {"environment": {"requirements": "requirements.txt"}},
        {"isolate": True},
        "environment.requirements",
    ),
    "secrets without network": ({"secrets": {"A": "aws-secretsmanager:x"}}, {"isolate": True}, "secrets"),
    "shells without network": ({}, {"isolate": True, "remote_debug": True}, "options.sagemaker.remote_debug"),
    "stream without network": (
        {"inputs": {"a": {"uri": "s3://b/k", "mode": "stream"}}},
        {"isolate": True},
        "inputs.a.mode",
    ),
    "trainium": ({"resources": {"accelerators": "Trainium:16"}}, {}, "resources.accelerators"),
    "trn": ({"resources": {"instance_type": "ml.trn1.32xlarge"}}, {}, "resources.instance_type"),
    "no ml": ({"resources": {"instance_type": "p4d.24xlarge"}}, {}, "resources.instance_type"),
    "other gpus": (
        {"resources": {"instance_type": "ml.g5.xlarge", "accelerators": "A10G:4"}},
        {},
        "resources.accelerators",
    ),
    "no such gpus": ({"resources": {"accelerators": "A100:3"}}, {}, "resources.accelerators"),
    "trainer's image": ({"entrypoint": None, "resources": {}}, {}, "image"),
    "cpu image": ({"resources": {}}, {}, "image"),
    "region of image": ({}, {"region": "mars-north-1"}, "image"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_sagemaker_would_refuse_is_named_by_its_field(name: str) -> None:
    changes, options, path = LIMITS[name]
    assert [problem.path for problem in made({**GPU, **changes}, options).problems] == [path]


@pytest.mark.parametrize("entry", ["launcher", "toolkit"])
@pytest.mark.parametrize(
    ("distribution", "said", "instead"),
    [
        ({"smdistributed": {"dataparallel": {"enabled": True}}}, "dataparallel", 'init_process_group("nccl")'),
        ({"smdistributed": {"modelparallel": {"enabled": True}}, "mpi": {"enabled": True}}, "modelparallel", "fsdp"),
        ({"mpi": {"enabled": True, "processes_per_host": 8}}, "mpi", "torch.distributed instead of MPI"),
    ],
)
def test_what_replaces_a_distribution_is_said(entry: str, distribution: dict, said: str, instead: str) -> None:
    (problem,) = made(GPU, {"entry": entry, "distribution": distribution}).problems
    assert f" {said} " in problem.message and instead in problem.hint


def test_a_checkpoint_folder_of_an_earlier_job_is_named_and_may_be_used() -> None:
    built = made(GPU, {"raw": {"CheckpointConfig": {"S3Uri": "s3://earlier/checkpoints"}}})
    assert built.request["CheckpointConfig"] == {
        "S3Uri": "s3://earlier/checkpoints",
        "LocalPath": "/opt/ml/checkpoints",
    }
    assert [note for note in built.notes if "read from s3://earlier/checkpoints and written to it" in note]
    needs = _Needs(built.request, {}, ACCOUNT).resources()
    assert "arn:aws:s3:::earlier/checkpoints/*" in needs["output"] and "arn:aws:s3:::earlier" in needs["buckets"]


def test_all_problems_come_at_once() -> None:
    built = made({"labels": {"k": "a;b"}, "resources": {"accelerators": "T4:3"}}, {"role": None, "bucket": None})
    assert {problem.path for problem in built.problems} >= {
        "labels.k",
        "resources.accelerators",
        "options.sagemaker.role",
        "options.sagemaker.bucket",
    }


def test_the_limits_are_those_of_the_service_model() -> None:
    import botocore.session

    shape = (
        botocore.session.get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    )

    def limit(path: str, what: str = "max"):
        at = shape
        for name in path.split("."):
            at = at.members[name] if at.type_name == "structure" else getattr(at, name)
        return at.metadata[what]

    ours = limits
    assert limit("HyperParameters.key") == ours.MAX_NAME
    assert limit("HyperParameters") == ours.MAX_HYPERPARAMETERS and limit("HyperParameters.value") == ours.MAX_VALUE
    assert (limit("Tags"), limit("Tags.member.Key"), limit("Tags.member.Value")) == (
        ours.MAX_TAGS,
        ours.MAX_TAG_KEY,
        ours.MAX_TAG_VALUE,
    )
    assert limit("InputDataConfig") == ours.MAX_CHANNELS
    assert limit("InputDataConfig.member.ChannelName") == ours.MAX_CHANNEL_NAME
    assert limit("OutputDataConfig.S3OutputPath") == limit("CheckpointConfig.S3Uri") == ours.MAX_URI
    specification = "AlgorithmSpecification"
    assert limit(f"{specification}.MetricDefinitions") == ours.MAX_METRICS
    assert limit(f"{specification}.MetricDefinitions.member.Name") == ours.MAX_METRIC_NAME
    assert limit(f"{specification}.MetricDefinitions.member.Regex") == ours.MAX_REGEX
    assert limit(f"{specification}.TrainingImage") == ours.MAX_IMAGE
    assert limit(f"{specification}.ContainerEntrypoint.member") == ours.MAX_ARGUMENT
    assert (limit("VpcConfig.Subnets"), limit("VpcConfig.SecurityGroupIds")) == (ours.MAX_SUBNETS, ours.MAX_GROUPS)
    assert limit("RetryStrategy.MaximumRetryAttempts") == ours.MAX_RETRIES
    assert limit("RoleArn", "pattern") == ours.ROLE and limit("TrainingJobName", "pattern") == ours.NAME
    assert limit("VpcConfig.Subnets.member", "pattern") == "[-0-9a-zA-Z]+"
    assert limit("OutputDataConfig.S3OutputPath", "pattern") == ours.URI
    assert limit("OutputDataConfig.KmsKeyId", "pattern") == ours.KEY


def test_every_named_field_is_one_of_the_service_model() -> None:
    """What is refused in `raw`, and what the estimator sets, are fields that exist."""
    shape = fields._input_shape()
    for path in {*fields.OWNED, *client.SETTABLE}:
        at = shape
        for name in path.split("."):
            at = at.members[name]
    pending = shape.members["StoppingCondition"].members["MaxPendingTimeInSeconds"].metadata
    assert (pending["min"], pending["max"]) == (fields.MIN_PENDING_S, fields.MAX_PENDING_S)


@pytest.mark.parametrize(
    ("section", "field", "key"),
    [
        ("StoppingCondition", "MaxRuntimeInSeconds", "limits.max_runtime"),
        ("CheckpointConfig", "LocalPath", "{checkpoint_dir}"),  # SageMaker copies this folder alone
    ],
)
def test_a_problem_in_raw_says_which_key_sets_the_field(section: str, field: str, key: str) -> None:
    (problem,) = made(GPU, {"raw": {section: {field: "5"}}}).problems
    assert (problem.message, problem.hint) == (
        f"sets {section}.{field}, which cloudtrain sets from {key}",
        f"use {key}",
    )


def test_images_are_where_their_registries_are() -> None:
    assert (machine.default_image("us-east-1") or "").startswith("763104351884.dkr.ecr.us-east-1.amazonaws.com/")
    assert "amazonaws.com.cn/" in (machine.default_image("cn-north-1") or "")
    assert machine.default_image("mars-north-1") is None


def test_a_region_with_a_slip_is_named() -> None:
    (problem,) = [
        each for each in made({**GPU, "image": None}, {"region": "us-est-1"}).problems if each.path == "image"
    ]
    assert problem.hint == "did you mean options.sagemaker.region: us-west-1 or us-east-1? else name one"
    (problem,) = [each for each in made({**GPU, "image": None}, {"region": "mars"}).problems if each.path == "image"]
    assert problem.hint == "name one"


def test_the_oracle_sees_what_is_wrong() -> None:
    """An oracle that lets everything pass would be believed."""
    request = made(GPU).request
    assert violations({**request, "TrainingJobName": "a_b"}) != []
    assert violations({**request, "Environment": {"A": "x" * 513}}) != []
    assert violations({**request, "Tags": [{"Key": "k", "Value": "a;b"}]}) != []
    assert violations({**request, "Nonsense": 1}) != []
    assert violations({**request, "ResourceConfig": {**request["ResourceConfig"], "InstanceType": "ml.x"}}) != []


@pytest.mark.parametrize(
    ("compress", "model", "outputs"), [(True, "model.tar.gz", "output.tar.gz"), (False, "model/", "output/")]
)
def test_a_later_job_finds_what_sagemaker_packed(tmp_path, home, compress: bool, model: str, outputs: str) -> None:
    (tmp_path / "train.py").write_text("")
    options = {
        "role": "arn:aws:iam::123456789012:role/train",
        "bucket": "mine",
        "region": "us-east-1",
        "image": "any/a:1",
    }
    job = Job(name="x", source=str(tmp_path), entrypoint="train.py", resources={"accelerators": "A100:8"})
    plan = Planner("sagemaker", **options, compress=compress).plan(job)
    found = {
        what: SagemakerBackend(options, tmp_path).packed(plan, what) for what in ("model", "outputs", "checkpoints")
    }
    assert found.pop("checkpoints") == "", "they are objects of their own"
    assert all(uri.startswith("s3://mine/") for uri in found.values())
    ends = [uri.partition(f"/{plan.request['TrainingJobName']}/output/")[2] for uri in found.values()]
    assert ends == [model, outputs]


OBJECT = {"Key": "r/output/a", "Size": 1, "LastModified": datetime(2026, 1, 1, tzinfo=UTC)}


def test_a_digest_is_that_of_what_sagemaker_packed(tmp_path, monkeypatch) -> None:
    """The stand-in is AWS itself: which operations are asked for, and with what."""
    backend = SagemakerBackend(ACCOUNT, tmp_path)
    objects = [{**OBJECT, "ETag": '"1"'}]

    def call(service: str, operation: str, **values: str) -> dict[str, object]:
        assert (service, operation, values["Prefix"]) == ("s3", "list_objects_v2", "r/output/")
        return {"Contents": objects}

    monkeypatch.setattr(backend.aws, "call", call)
    first = backend.packed_digest("s3://mine/r/output/")
    objects[0]["ETag"] = '"2"'
    assert len(first) == 64 and backend.packed_digest("s3://mine/r/output/") not in ("", first)
    objects.clear()
    assert backend.packed_digest("s3://mine/r/output/") == ""


def test_the_accounts_registry_is_logged_in_to(tmp_path, monkeypatch) -> None:
    asked: list[str] = []
    granted = {"authorizationToken": base64.b64encode(b"AWS:word").decode(), "proxyEndpoint": "https://123.ecr"}

    def call(service: str, operation: str, **values: object) -> dict[str, object]:
        asked.append(operation)
        if operation == "describe_repositories":
            raise AwsError("none", code="RepositoryNotFoundException")
        return {"authorizationData": [granted]}

    backend = SagemakerBackend(ACCOUNT, tmp_path)
    monkeypatch.setattr(backend.aws, "call", call)
    login = backend.image_registry("cloudtrain-train")
    assert (login.host, login.user, login.password) == ("123.ecr", "AWS", "word")
    assert asked == ["describe_repositories", "create_repository", "get_authorization_token"]


def test_an_output_is_opened_with_the_credentials_that_the_options_name(monkeypatch) -> None:
    used: list[tuple[str | None, str | None, str]] = []

    def call(self: Aws, service: str, operation: str, **values: object) -> None:
        used.append((self.profile, self.endpoint, f"{values['Bucket']}/{values['Key']}"))

    monkeypatch.setattr(Aws, "call", call)
    files = SagemakerBackend.open_output("s3://mine/runs", {"profile": "team", "endpoint": "https://store"})
    assert files is not None and files.add("r/audit/1.json", b"{}")
    assert used == [("team", "https://store", "mine/runs/r/audit/1.json")]
    assert SagemakerBackend.open_output("/shared/runs", {"profile": "team"}) is None


def test_an_estimator_needs_the_sdk(tmp_path, home, monkeypatch) -> None:
    monkeypatch.setattr(client, "find_spec", lambda name: None)
    (tmp_path / "train.py").write_text("")
    options = {**ACCOUNT, "image": "any/a:1"}
    job = Job(name="x", source=str(tmp_path), entrypoint="train.py", resources={"accelerators": "A100:8"})
    with pytest.raises(MissingExtra, match="sagemaker"):
        SagemakerBackend(options, tmp_path).estimator(Planner("sagemaker", **options).plan(job))
