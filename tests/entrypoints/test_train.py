"""The shared trainer as a whole: what it says, what it leaves behind, what it refuses."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.history.event_records import wandb_records
from tests.entrypoints.training import ENTRYPOINTS, TINY, Trainer, texts, train

pytestmark = pytest.mark.train


def test_a_language_model_is_trained_and_loads_again(tmp_path: Path):
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--num_train_epochs", "2", "--logging_steps", "20"]
    done = train(tmp_path / "run", [*args, "--sample_tokens", "12", "--sample_prompt", "ab"])
    held = done.held_out()
    assert held[max(held)] < held[0] - 0.3
    said = done.output()
    first, last = held[0], held[max(held)]
    assert f"held-out loss {first:.3f} -> {last:.3f}" in said
    assert f"model saved in {tmp_path}/run/model" in said
    assert "sample:\n    ab" in said
    assert "tokens/s  ETA " in said and "\rstep" not in said and "it/s]" not in said
    metric = done.events("metric")[1]
    assert metric.keys() >= {"step", "loss", "learning_rate", "tokens_per_s", "grad_norm", "epoch"}
    assert "mfu" not in metric and "MFU" not in said and "peak_flops" not in done.events("world")[0], "a CPU has none"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run" / "model"
    assert (folder / "model.safetensors").is_file() and not (tmp_path / "run" / "model.partial").exists()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("abc def", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape[-1] == len(tokenizer) == 300
    assert tokenizer.decode(ids[0]) == "abc def"


def test_a_trained_model_is_trained_further(tmp_path: Path):
    args = ["--dataset", str(texts(tmp_path / "texts")), "--logging_steps", "20", "--sample_tokens", "0"]
    first = train(tmp_path / "first", [*TINY, *args, "--num_train_epochs", "1"])
    more = ["--model", str(tmp_path / "first" / "model"), "--block_size", "16", "--learning_rate", "1e-3"]
    second = train(tmp_path / "second", [*args, *more, "--max_steps", "3"])
    assert second.held_out()[0] == pytest.approx(min(first.held_out().values()), abs=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_classification_learns_from_a_table(tmp_path: Path, world: int):
    from sklearn.metrics import f1_score

    kinds = [("awful bad poor", "low"), ("great good fine", "high"), ("plain", "middle")]
    # The model is right on 13 samples but one; with two ranks one has no sample in the last batch of an evaluation.
    held = ["low"] * 7 + ["high"] * 3 + ["middle"] * 3
    truth = ["low"] * 6 + ["middle"] + held[7:]
    words = {label: word for word, label in kinds}
    trained = [kinds[number % 3] for number in range(108)]
    for name, chosen in (("table", trained), ("held", [(words[truth[at]], held[at]) for at in range(13)])):
        with open(tmp_path / f"{name}.csv", "w", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow(["review", "stars"])
            rows.writerows(
                [" ".join([word] * (1 + number % 4)) + f" no {number}", label]
                for number, (word, label) in enumerate(chosen)
            )
    args = ["--task", "sequence-classification", "--dataset", str(tmp_path / "table.csv"), "--text_column", "review"]
    args += ["--label_column", "stars", "--eval_dataset", str(tmp_path / "held.csv"), "--num_train_epochs", "4"]
    args += ["--per_device_eval_batch_size", "6"]
    done = train(tmp_path / "run", [*TINY, *args, "--block_size", "32", "--bf16", "true"], world)
    last = done.events("metric")[-1]
    assert last["eval_accuracy"] == pytest.approx(12 / 13)
    assert last["eval_f1"] == pytest.approx(f1_score(held, truth, average="macro"))
    assert f"held-out loss {done.held_out()[0]:.3f} -> " in done.output() and "accuracy 0.923" in done.output()

    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.id2label == {0: "high", 1: "low", 2: "middle"}


def read_wandb(file: Path):
    """Return the run record of an offline file, the names of the tables that were logged, and the values of each step."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for data, _ in wandb_records(file.read_bytes(), 0):
        records.append(wandb_internal_pb2.Record())
        records[-1].ParseFromString(data)
    items = [item for record in records for item in record.history.item]
    names = {(item.key or item.nested_key[0]) for item in items if "table-file" in item.value_json}
    steps = {
        record.history.step.num: {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    }
    return next(record.run for record in records if record.HasField("run")), sorted(names), steps


def test_trackers_hear_of_it(tmp_path: Path):
    args = [
        *TINY,
        "--dataset",
        str(texts(tmp_path / "texts")),
        "--max_steps",
        "3",
        "--report_to",
        "tensorboard",
        "wandb",
        *[
            "--wandb_project",
            "my-project",
            "--wandb_entity",
            "my-team",
            "--wandb_group",
            "first",
            "--wandb_tags",
            "a",
            "b",
        ],
        *("--sample_prompt", "ab", "--sample_prompts", "cd", "ef"),
    ]
    done = train(tmp_path / "run", args, WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(tmp_path))
    found = [path.name for path in (tmp_path / "run" / "outputs").rglob("*") if path.is_file()]
    assert any(name.startswith("events.out.tfevents") for name in found)
    run, tables, steps = read_wandb(next((tmp_path / "run" / "outputs").rglob("*.wandb")))
    assert (run.project, run.entity, run.run_group, list(run.tags)) == ("my-project", "my-team", "first", ["a", "b"])
    assert tables == ["samples"]
    assert steps[0].keys() >= {"eval_loss", "eval_perplexity"} and steps[3].keys() >= {"loss", "eval_perplexity"}

    (table,) = (row for row in done.events("media") if row["name"] == "samples")
    assert table["shown"]["columns"] == ["prompt", "text"] and [row[0] for row in table["shown"]["rows"]] == [
        "ab",
        "cd",
        "ef",
    ]
    assert all(text.startswith(prompt) for prompt, text in table["shown"]["rows"])

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run" / "outputs" / "my-project"))
    board.Reload()
    assert [row.step for row in board.Scalars("loss")] == [1, 2, 3]


def test_inputs_of_the_job_are_the_data(tmp_path: Path):
    folder = texts(tmp_path / "in")
    args = [*TINY, "--max_steps", "2"]
    inputs = {"CLOUDTRAIN_INPUT_TRAIN": str(folder), "CLOUDTRAIN_INPUT_VALIDATION": str(folder / "text1.txt")}
    train(tmp_path / "run", args, **inputs)
    with Trainer(tmp_path / "none", args) as without:
        assert without.codes() == [78]
    assert "no input named train" in without.output()


REFUSED = {
    "no world": ({"WORLD_SIZE": "1", "CLOUDTRAIN_PARALLELISM": '{"strategy": "zero9"}'}, [], "no strategy zero9"),
    "later": (
        {"CLOUDTRAIN_PARALLELISM": '{"strategy": "ddp", "tp_size": 2}'},
        [],
        "tp_size 2 does not divide the 1 processes",
    ),
    "hub": ({"HF_TOKEN": ""}, ["--push_to_hub", "--hub_model_id", "a/b"], "HF_TOKEN"),
    "data": ({}, ["--dataset", "nowhere/*.txt"], "nowhere/*.txt does not exist"),
    "fp16": ({}, ["--fp16"], "--fp16 needs a GPU"),
    "tracker": ({}, ["--report_to", "comet_ml"], "pip install comet_ml"),
    "tracker without a login": (
        {"WANDB_API_KEY": "", "WANDB_MODE": "", "NETRC": "", "HOME": "/nowhere"},
        ["--report_to", "wandb"],
        "there is no key of W&B: add WANDB_API_KEY to secrets",
    ),
    "model": ({}, ["--model_type", "lama"], "of type lama cannot be created"),
    "heads": ({}, ["--num_attention_heads", "5"], "not a multiple"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(tmp_path: Path, case: str):
    env, more, sentence = REFUSED[case]
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), *more]
    with Trainer(tmp_path / "run", args, env=env) as refused:
        assert refused.codes() == [78], refused.output()
    [line] = [line for line in refused.output().splitlines() if line.startswith("train.py: ")]
    assert sentence in line
    assert "Traceback" not in refused.output()
    assert not (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_rank_that_fails_ends(tmp_path: Path):
    """Its error is shown and its process ends, whatever the other ranks wait for."""
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--max_steps", "400"]
    with Trainer(tmp_path / "run", args, 2) as broken:
        broken.wait_for_step(3)
        broken.processes[1].send_signal(9)
        broken.processes[0].wait(150)
    assert broken.processes[0].returncode not in (0, None)
    assert "Traceback" in broken.output()


def test_an_old_library_is_refused_before_torch_is_imported(tmp_path: Path):
    old = tmp_path / "transformers-4.55.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.55.0\n")
    command = [sys.executable, "-X", "importtime", str(ENTRYPOINTS / "train.py"), "--dataset", "python-stdlib"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 78
    sentence = "train.py: the shared trainer needs transformers 4.56.0 or newer, here is 4.55.0"
    assert sentence in done.stderr.splitlines()
    assert not [line for line in done.stderr.splitlines() if line.endswith((" torch", " transformers", " accelerate"))]


def test_misspelt_flags_are_told_before_torch_is_imported():
    command = [
        sys.executable,
        "-X",
        "importtime",
        str(ENTRYPOINTS / "train.py"),
        "--learnin_rate",
        "1",
        "--bf16",
        "maybe",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--learnin_rate is not a flag of the shared trainer; did you mean --learning_rate?" in done.stderr
    assert "--bf16 takes true or false, not 'maybe'" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.endswith((" torch", " transformers", " accelerate"))]
