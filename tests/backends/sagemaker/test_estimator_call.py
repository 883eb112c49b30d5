"""Estimator calls become jobs; the code is never run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from cloudtrain.backends.sagemaker import estimator_call
from cloudtrain.backends.sagemaker.estimator_call import convert
from cloudtrain.backends.sagemaker.options import SagemakerOptions
from cloudtrain.cli import main
from cloudtrain.errors import BadRequest
from cloudtrain.job.job import Job
from cloudtrain.source.literals import read_code
from tests.backends.sagemaker import test_request
from tests.backends.sagemaker.notebooks import CALLS, HEAD

DOCS = Path(__file__).parents[3] / "docs"
LARGE = """
from sagemaker.huggingface import HuggingFace
KMS = "alias/data"
estimator = HuggingFace(
    entry_point="run_clm.py", source_dir="scripts", role="arn:aws:iam::123456789012:role/training", instance_count=4,
    instance_type="ml.p4d.24xlarge", volume_size=500, max_run=2 * 3600, output_path="s3://bucket/out", output_kms_key=KMS,
    subnets=["subnet-1"], security_group_ids=["sg-1"], enable_network_isolation=False, max_retry_attempts=2,
    keep_alive_period_in_seconds=600, disable_output_compression=True, tags={"team": "nlp"}, base_job_name="clm",
    metric_definitions=[{"Name": "loss", "Regex": "loss=([0-9.]+)"}], environment={"A": "b"}, debugger_hook_config=False,
    distribution={"smdistributed": {"dataparallel": {"enabled": True}}}, hyperparameters={"fp16": True, "lr": 5e-5},
    transformers_version="4.28.1", pytorch_version="2.0.0", py_version="py310", model_uri="s3://bucket/start",
)
estimator.fit("s3://bucket/data")
"""


def test_every_argument_has_its_key_or_a_note() -> None:
    job, notes = convert(LARGE)
    assert job == {
        "entrypoint": "run_clm.py",
        "source": "scripts",
        "num_nodes": 4,
        "resources": {"instance_type": "ml.p4d.24xlarge", "disk_gb": 500},
        "limits": {"max_runtime": "7200s"},
        "output": "s3://bucket/out",
        "retry": {"max_attempts": 3},
        "labels": {"team": "nlp"},
        "name": "clm",
        "metrics": {"loss": "loss=([0-9.]+)"},
        "env": {"A": "b"},
        "hyperparameters": {"fp16": True, "lr": 5e-5},
        "arg_style": "hf",
        "inputs": {"training": "s3://bucket/data"},
        "options": {
            "sagemaker": {
                "role": "arn:aws:iam::123456789012:role/training",
                "kms_key": "alias/data",
                "subnets": ["subnet-1"],
                "security_groups": ["sg-1"],
                "isolate": False,
                "keep_alive_s": 600,
                "compress": False,
            }
        },
    }
    Job.from_dict(job)
    assert [note.partition(":")[0] for note in notes] == ["distribution", "model_uri", "image"]
    assert notes[0].startswith("distribution: dataparallel: ") and 'init_process_group("nccl")' in notes[0]
    assert "transformers_version 4.28.1, pytorch_version 2.0.0" in notes[-1]


TRAINER = """
from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, InputData, Networking, OutputDataConfig, SourceCode, StoppingCondition
code = SourceCode(source_dir="scripts", entry_script="run_clm.py", requirements="requirements.txt")
trainer = ModelTrainer(
    training_image="mine:1", source_code=code, role="arn:aws:iam::123456789012:role/training", base_job_name="clm",
    compute=Compute(instance_type="ml.p4d.24xlarge", instance_count=4, volume_size_in_gb=500,
                    keep_alive_period_in_seconds=600, instance_groups=None),
    networking=Networking(subnets=["subnet-1"], security_group_ids=["sg-1"], enable_network_isolation=False),
    stopping_condition=StoppingCondition(max_runtime_in_seconds=2 * 3600, max_pending_time_in_seconds=3600),
    output_data_config=OutputDataConfig(s3_output_path=where(), compression_type="NONE"),
    checkpoint_config=CheckpointConfig(s3_uri="s3://bucket/checkpoints"), distributed=Torchrun(),
    environment={"A": "b"}, hyperparameters={"lr": 5e-5}, input_data_config=[InputData("not", "these")],
).with_retry_strategy(RetryStrategy(maximum_retry_attempts=2))
trainer.train(input_data_config=[InputData(channel_name="train", data_source="s3://bucket/data"), InputData(
    channel_name="test", data_source=S3DataSource(s3_uri="s3://bucket/test", s3_data_type="S3Prefix"))], wait=False)
"""


def test_a_model_trainer_of_sdk_3_becomes_a_job() -> None:
    job, notes = convert(TRAINER)
    assert job == {
        "image": "mine:1",
        "source": "scripts",
        "entrypoint": "run_clm.py",
        "environment": {"requirements": "requirements.txt"},
        "name": "clm",
        "num_nodes": 4,
        "resources": {"instance_type": "ml.p4d.24xlarge", "disk_gb": 500},
        "limits": {"max_runtime": "7200s"},
        "env": {"A": "b"},
        "hyperparameters": {"lr": 5e-5},
        "inputs": {"train": "s3://bucket/data", "test": "s3://bucket/test"},
        "options": {
            "sagemaker": {
                "role": "arn:aws:iam::123456789012:role/training",
                "keep_alive_s": 600,
                "subnets": ["subnet-1"],
                "security_groups": ["sg-1"],
                "isolate": False,
                "max_pending": "3600s",
                "compress": False,
            }
        },
    }
    Job.from_dict(job)
    said = ["compute.instance_groups", "output", "checkpoint_config.s3_uri", "distributed", "retry.max_attempts"]
    assert [note.partition(":")[0] for note in notes] == said
    constructor = 'ModelTrainer(source_code=SourceCode(entry_script="t.py"), input_data_config=INPUTS).train()'
    for written, expected in (
        ('[InputData(channel_name="a", data_source="s3://b")]', {"a": "s3://b"}),
        ('[InputData(channel_name="a", data_source=FileSystemDataSource(file_system_id="fs-1"))]', None),
        (
            '[InputData(channel_name="a", data_source=FileSystemDataSource(file_system_id="fs-1", '
            'file_system_type="EFS", directory_path="/d"))]',
            {"a": "efs://fs-1/d"},
        ),
    ):
        job, notes = convert(constructor.replace("INPUTS", written))
        assert job.get("inputs") == expected and bool(notes) == (expected is None)


CHANNELS = """
labelled = TrainingInput(s3_data="s3://data/labelled.manifest", s3_data_type="AugmentedManifestFile", input_mode="Pipe",
                         attribute_names=["source", "label"], record_wrapping="RecordIO")
PyTorch(entry_point="t.py", checkpoint_s3_uri="s3://earlier/checkpoints", input_mode="FastFile").fit({
    "train": TrainingInput("s3://data/train.manifest", s3_data_type="ManifestFile", input_mode="File"),
    "texts": TrainingInput("s3://data/texts/", content_type="text/csv", compression="Gzip", input_mode="File",
                           distribution="ShardedByS3Key", shuffle_config=ShuffleConfig(7)),
    "labelled": labelled, "all": "s3://data/all", "other": TrainingInput("s3://b", content_type=kind(), new=1),
    "lustre": FileSystemInput(file_system_id="fs-01234567", file_system_type="FSxLustre", directory_path="/a/b"),
})
"""


def test_channels_of_all_kinds_become_those_of_the_golden_request() -> None:
    job, notes = convert(CHANNELS)
    options = job["options"]["sagemaker"]
    wanted, golden = test_request.CASES["channels"]
    assert job["inputs"] == {
        **{name: item["uri"] if isinstance(item, dict) else item for name, item in wanted["inputs"].items()},
        "all": {"uri": "s3://data/all", "mode": "mount"},
        "other": {"uri": "s3://b", "mode": "mount"},
        "lustre": "fsx://fs-01234567/a/b",
    }
    assert (options["shard"], options["pipe"]) == (golden["shard"], golden["pipe"])
    assert options["raw"]["InputDataConfig"] == golden["raw"]["InputDataConfig"]
    assert notes[0].endswith("{CheckpointConfig: {S3Uri: ...}}") and notes[1:] == [
        "inputs.other: write content_type yourself, because the script computes it",
        "inputs.other: new has no key; write the field of the API into raw",
    ]
    job, notes = convert('ModelTrainer(distributed=MPI(), training_input_mode=mode()).train(input_data_config=["x"])')
    assert job == {} and [note.partition(": ")[0] for note in notes] == ["distributed", "inputs.NAME.mode", "inputs"]
    with pytest.raises(BadRequest) as caught:
        convert("ModelTrainer.from_recipe(training_recipe='fine-tuning/llama')")
    assert "write the recipe's script" in caught.value.hint


def test_ten_notebooks_become_jobs() -> None:
    for name, call in CALLS.items():
        job, notes = convert(HEAD + call)
        SagemakerOptions(**job.get("options", {}).get("sagemaker", {}))
        assert Job.from_dict(job).entrypoint == f"{name}.py"
        assert "options.sagemaker.role: write this value yourself, because the script computes it: role" in notes


def test_the_code_is_not_run_and_what_it_computes_is_said(tmp_path: Path) -> None:
    code = (
        f"open({str(tmp_path / 'ran')!r}, 'w')\nk = ask()\nEstimator(entry_point=k, image_uri=f'{{k}}:1').fit(data())"
    )
    job, notes = convert(code)
    assert job == {} and not (tmp_path / "ran").exists()
    assert [note.partition(":")[0] for note in notes] == ["entrypoint", "image", "inputs"]
    for wrong in ("print(1)", "def"):
        with pytest.raises(BadRequest):
            convert(wrong)


def test_a_notebook_is_read_without_its_magic(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# title"]},
        {"cell_type": "code", "source": ["%pip install sagemaker\n", "!ls\n", "x = 'train.py'"]},
        {"cell_type": "code", "source": "Estimator(entry_point=x)"},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    assert convert(read_code(tmp_path / "n.ipynb"))[0] == {"entrypoint": "train.py"}
    (tmp_path / "broken.ipynb").write_text("[]")
    with pytest.raises(BadRequest, match="cannot be read"):
        read_code(tmp_path / "broken.ipynb")


def test_the_checkpoints_of_sagemaker_are_the_runs_folder() -> None:
    job, notes = convert('Estimator(entry_point="t.py", hyperparameters={"path": "/opt/ml/checkpoints", "lr": 0.1})')
    assert job["hyperparameters"] == {"path": "{checkpoint_dir}", "lr": 0.1}
    assert notes == [
        "hyperparameters.path: {checkpoint_dir} instead of /opt/ml/checkpoints; a node puts the run's checkpoint folder "
        "there on every target"
    ]


def test_init_writes_the_job_of_a_call(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "launch.py").write_text(HEAD + CALLS["every_channel"])
    output = tmp_path / "job.yaml"
    assert main(["init", "--from", str(tmp_path / "launch.py"), "-o", str(output)]) == 0
    text = output.read_text()
    assert "# options.sagemaker.role: write this value yourself" in text and "arg_style: hf" in text
    assert main(["init", "--from", str(output), "x.py"]) == 2


def test_the_page_shows_what_init_writes() -> None:
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", (DOCS / "sagemaker-sdk.md").read_text(), re.DOTALL)
    estimator, trainer, job = blocks[:3]
    shown = yaml.safe_load(job)
    assert {**convert(estimator)[0], "name": "estimator", "target": "sagemaker"} == shown
    converted = convert(trainer)[0]
    assert {**converted, "name": "estimator", "target": "sagemaker"} == {**shown, "image": converted["image"]}


def test_what_is_mapped_are_keys_of_a_job() -> None:
    for key in [*estimator_call.KEYS.values(), *(key for key, _ in estimator_call.CHANGED.values())]:
        first, _, rest = key.partition(".")
        assert first in Job.model_fields
        if first == "options":
            assert rest.partition(".")[2] in SagemakerOptions.model_fields


def test_a_launcher_that_waits_for_other_nodes_is_noted():
    source = 'SourceCode(source_dir=".", command="torchrun --nnodes 4 train.py")'
    _, notes = convert(f"ModelTrainer(source_code={source}, compute=Compute(instance_count=2))")
    assert any(note.startswith("run: torchrun --nnodes 4 waits") for note in notes)
