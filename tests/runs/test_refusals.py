"""What a node would refuse is refused when a job is planned, with the sentence that the node has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.errors import BadJob
from cloudtrain.runs.planning.checks import job as job_checks
from cloudtrain.runs.planning.plan import Planner


@pytest.fixture(autouse=True)
def something_to_package(tmp_path: Path, home: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing to run")


DATA = {"dataset": "python-stdlib"}
TRAINER = {"name": "x", "trainer": True, "processes_per_node": 4, "hyperparameters": DATA}


def refused(folder: Path, **changes: object) -> list[str]:
    given = {"hyperparameters": {**DATA, **changes.pop("hyperparameters", {})}} if changes.get("trainer") else {}
    with pytest.raises(BadJob) as caught:
        Planner().plan({"source": str(folder), **changes, **given})
    assert not list(folder.rglob("request.json"))
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hyperparameters": {"learnin_rate": 1}},
         "hyperparameters.learnin_rate: --learnin_rate is not a flag of the shared trainer; did you mean --learning_rate?"),
        ({"processes_per_node": 3, "parallelism": {"tp_size": 3}},
         "parallelism.tp_size: tp_size 3 does not divide the model's 4 attention heads"),
        ({"hyperparameters": {"num_key_value_heads": 2}, "parallelism": {"tp_size": 4}},
         "parallelism.tp_size: tp_size 4 does not divide the model's 2 key and value heads"),
        ({"hyperparameters": {"num_hidden_layers": 3}, "parallelism": {"pp_size": 2}},
         "parallelism.strategy: 3 layers cannot be split equally over 2 pipeline stages"),
        ({"parallelism": {"strategy": "none"}},
         "parallelism.strategy: strategy none is for one process, the job has 4 (remove it, or write ddp)"),
        ({"parallelism": {"strategy": "hsdp", "dp_replicate_size": 4}},
         "parallelism.dp_replicate_size: hsdp needs at least 2 replicas of at least 2 shards, and the 4 data-parallel "
         "processes would be 4 of 1: set dp_replicate_size to 2, or write ddp"),
        ({"parallelism": {"strategy": "zero3", "tp_size": 2}},
         "parallelism.tp_size: strategy zero3 cannot be combined with tp_size: use fsdp instead"),
        ({"parallelism": {"strategy": "zero1", "pp_size": 4}},
         "parallelism.pp_size: strategy zero1 cannot be combined with pp_size: use fsdp instead"),
        ({"parallelism": {"microbatches": 4}},
         "parallelism.microbatches: parallelism.microbatches works with a pipeline only: set pp_size, or remove it"),
        ({"parallelism": {"pp_schedule": "gpipe"}},
         "parallelism.pp_schedule: parallelism.pp_schedule works with a pipeline only: set pp_size, or remove it"),
        ({"parallelism": {"virtual_stages": 2}},
         "parallelism.virtual_stages: parallelism.virtual_stages works with a pipeline only: set pp_size, or remove it"),
        ({"parallelism": {"strategy": "zero2", "cp_size": 2}},
         "parallelism.cp_size: strategy zero2 cannot be combined with cp_size: use fsdp instead"),
        ({"parallelism": {"pp_size": 2, "cp_size": 2}},
         "parallelism.cp_size: cp_size 2 cannot be combined with pp_size: use fsdp or tp_size instead of pp_size"),
        ({"parallelism": {"offload": True}},
         "parallelism.offload: strategy ddp has nothing to offload; remove parallelism.offload"),
        ({"hyperparameters": {"use_peft": True, "model": "gpt2"}, "parallelism": {"tp_size": 2}},
         "hyperparameters.use_peft: --use_peft cannot be combined"),
    ],
)  # fmt: skip
def test_what_the_shared_trainer_would_refuse(tmp_path: Path, changes: dict, expected: str):
    """A script of one's own may mean something else by the same words."""
    [sentence] = refused(tmp_path, **{**TRAINER, **changes})
    assert sentence.startswith(expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "hyperparameters.dataset: there is no --dataset and the job has no input named train"),
        ({"dataset": "input:texts"}, "hyperparameters.dataset: --dataset input:texts: the job has no input 'texts'"),
        (
            {"dataset": "text/*.txt"},
            "hyperparameters.dataset: --dataset text/*.txt: no such file or folder in the source",
        ),
        (
            {"dataset": "notes.txt", "eval_dataset": "held.jsonl"},
            "hyperparameters.eval_dataset: --eval_dataset held.jsonl",
        ),
    ],
)
def test_data_that_is_not_there_is_refused(tmp_path: Path, given: dict, expected: str):
    with pytest.raises(BadJob) as caught:
        Planner().plan({**TRAINER, "source": str(tmp_path), "hyperparameters": given})
    [problem] = caught.value.problems
    assert f"{problem.path}: {problem.message}".startswith(expected)


def test_a_model_that_is_no_folder_of_the_source_is_noted(tmp_path: Path):
    for folder in ("mine", "models"):
        (tmp_path / folder).mkdir()

    def noted(model: str, **changes: object) -> list[str]:
        job = {"name": "x", "source": str(tmp_path), "trainer": True, "hyperparameters": {**DATA, "model": model}}
        return [note for note in Planner().plan({**job, **changes}).notes if f"--model {model}" in note]

    missing = "--model {}: the source has no such folder"
    hub = "; it is taken as the name of a model on the Hugging Face Hub"
    assert noted("base") == [missing.format("base") + hub]
    assert noted("models/base") == [missing.format("models/base") + hub]  # its first part is a folder here
    assert noted("./base") == [missing.format("./base")] and noted("a/b/c") == [missing.format("a/b/c")]
    for model in ("mine", "org/name", "/data/base"):
        assert not noted(model)
    assert not noted("base", setup="cp -r /data/base .")


@pytest.mark.parametrize("dataset", ["notes.txt", "*.txt", "org/name", "/data/all.jsonl", "python-stdlib"])
def test_data_that_may_be_there_is_not_refused(tmp_path: Path, dataset: str):
    assert Planner().plan({**TRAINER, "source": str(tmp_path), "hyperparameters": {"dataset": dataset}})
    made = {**TRAINER, "setup": "python download.py", "hyperparameters": {"dataset": "made-by-setup.jsonl"}}
    assert Planner().plan({**made, "source": str(tmp_path)}), "set-up commands may bring it"


@pytest.mark.parametrize(
    "parallelism",
    [
        {"strategy": "fsdp", "tp_size": 2}, {"cp_size": 2}, {"strategy": "fsdp", "cp_size": 2, "tp_size": 2},
        {"pp_size": 2, "pp_schedule": "gpipe", "microbatches": 4}, {"strategy": "zero3", "offload": True},
        {"strategy": "hsdp", "dp_replicate_size": 2},
    ],
)  # fmt: skip
def test_what_the_shared_trainer_carries(tmp_path: Path, parallelism: dict):
    assert Planner().plan({**TRAINER, "source": str(tmp_path), "parallelism": parallelism})


def test_all_of_its_arguments_problems_come_at_once(tmp_path: Path):
    given = {"learnin_rate": 1, "max_steps": "many"}
    assert [line.partition(":")[0] for line in refused(tmp_path, **TRAINER | {"hyperparameters": given})] == [
        "hyperparameters.learnin_rate",
        "hyperparameters.max_steps",
    ]


def test_a_script_that_splits_no_model_cannot_be_split(tmp_path: Path):
    (tmp_path / "train.py").write_text("print(1)\n")
    job = {"name": "x", "entrypoint": "train.py", "processes_per_node": 4, "parallelism": {"tp_size": 4}}
    [sentence] = refused(tmp_path, **job)
    assert sentence.startswith(
        "parallelism.tp_size: parallelism.tp_size is 4, but no code splits the model in train.py"
    )
    (tmp_path / "train.py").write_text("# cloudtrain: tp_size\n")
    assert Planner().plan({**job, "source": str(tmp_path)})


def test_the_command_exits_with_2_and_names_the_line(tmp_path: Path):
    (tmp_path / "job.yaml").write_text("name: x\ntrainer: true\nhyperparameters:\n  learnin_rate: 1\n")
    command = [sys.executable, "-m", "cloudtrain", "submit", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did you mean --learning_rate?" in done.stderr and "job.yaml:4" in done.stderr


def test_no_heavy_module_is_imported():
    text = (
        "import sys\nfrom cloudtrain.source import node_code\nnode_code.module('trainer.preview')\n"
        "node_code.module('launcher.prepare.declared')\nprint({'torch', 'transformers', 'accelerate'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


STOCK = "763104351884.dkr.ecr.us-east-1.amazonaws.com/huggingface-pytorch-training:"


@pytest.mark.parametrize(
    ("image", "parallelism", "expected"),
    [
        (STOCK + "2.8.0-transformers4.56.2-gpu-py312-cu129-ubuntu22.04", {"strategy": "fsdp"}, []),
        (STOCK + "2.8.0-transformers4.56.2-gpu-py312-cu129-ubuntu22.04", {"tp_size": 2},
         ["parallelism.tp_size: tp_size needs torch 2.13.0 or newer, in huggingface-pytorch-training is 2.8.0",
          "parallelism.tp_size: tp_size needs transformers 5.23.0 or newer, in huggingface-pytorch-training is 4.56.2"]),
        (STOCK + "2.5.1-transformers4.49.0-gpu-py311-cu124-ubuntu22.04", {},
         ["image: the shared trainer needs torch 2.8.0 or newer, in huggingface-pytorch-training is 2.5.1",
          "image: the shared trainer needs transformers 4.56.0 or newer, in huggingface-pytorch-training is 4.49.0"]),
        ("example.org/mine:2.5.1", {"tp_size": 2}, []),
    ],
)  # fmt: skip
def test_an_image_whose_name_says_that_it_is_too_old(image: str, parallelism: dict, expected: list[str]):
    from cloudtrain.job.job import Job

    found = job_checks.find_refusals(Job(**TRAINER), parallelism, 4, 1, images=[image])
    assert [f"{problem.path}: {problem.message}" for problem in found] == expected


def test_a_plan_for_sagemaker_names_what_the_stock_image_lacks(tmp_path: Path):
    """The shared trainer runs in Hugging Face's image where no other one is named, but splits no model there."""
    target = {"region": "us-east-1", "bucket": "some-bucket", "role": "arn:aws:iam::123456789012:role/r"}
    job = {
        "name": "x", "trainer": True, "source": str(tmp_path), "target": "sagemaker", "options": {"sagemaker": target},
        "resources": {"instance_type": "ml.g5.12xlarge"}, "processes_per_node": 4, "hyperparameters": DATA,
    }  # fmt: skip
    plan = Planner().plan(job | {"parallelism": {"strategy": "fsdp"}})
    assert "transformers4.56.2" in plan.request["AlgorithmSpecification"]["TrainingImage"]
    sentences = refused(tmp_path, **job | {"parallelism": {"tp_size": 4}})
    assert any("tp_size needs torch 2.13.0 or newer" in sentence for sentence in sentences)
