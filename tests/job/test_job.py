"""The job: what the file says is what every part of the house reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.errors import BadJob, BadRequest, Problem
from cloudtrain.job.job import (
    Checkpoint,
    Environment,
    Input,
    Job,
    Limits,
    Parallelism,
    Resources,
    Retry,
    fit_name,
    schema,
)

# the job file of the design, whole
WHOLE = """
name: tiny-lm
source: .
entrypoint: train.py
hyperparameters:
  learning_rate: 3.0e-4
  layers: [2, 4]
  bf16: true
arg_style: argparse
args: ["--tag", "a b"]
environment: {requirements: requirements.txt}
num_nodes: 2
min_nodes: 1
processes_per_node: 8
resources: {accelerators: "A100-80GB:8", use_spot: true, disk_gb: 200, cpus: 8, memory: 64GiB, instance_type: p4d}
parallelism: {strategy: fsdp, tp_size: 1, pp_size: 1, dp_shard_size: 16, microbatches: 4, offload: true}
limits: {max_runtime: 24h, grace: 1m}
checkpoint: {every: 15m, keep: 3}
inputs: {train: {uri: "s3://bucket/train/", mode: mount}, more: data/}
output: s3://bucket/prefix
env: {TOKENIZERS_PARALLELISM: "false"}
secrets: {HF_TOKEN: ["aws-secretsmanager:hf", "env:HF_TOKEN"], WANDB: "file:/etc/w"}
labels: {team: nlp}
metrics: {loss: "loss=([0-9.e+-]+)"}
retry: {max_attempts: 5, on_events: [preempted, lost, capacity]}
image: registry/name:tag
target: local
options:
  sagemaker: {role: "arn:...", bucket: my-bucket, region: us-east-1}
  ssh: {hosts: [{address: 10.0.0.5, user: ml}]}
"""


def job(text: str = "", sets=()) -> Job:
    return Job.load(f"name: x\n{text}{entry(text)}", sets)


def entry(text: str) -> str:
    """What a text needs besides to be a job."""
    return "" if re.search("(entrypoint|trainer|run):", text) else "\nentrypoint: t.py"


def problems(text: str) -> list[str]:
    with pytest.raises(BadJob) as caught:
        Job.load(f"name: x\n{text}{entry(text)}")
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


def test_the_whole_file(tmp_path):
    (tmp_path / "job.yaml").write_text(WHOLE)
    made = Job.load(tmp_path / "job.yaml")
    assert made.argv() == ["train.py", "--learning_rate", "3.0e-4", "--layers", "2", "4", "--bf16", "--tag", "a b"]
    assert made.source == str(tmp_path)
    assert (made.num_nodes, made.min_nodes, made.processes, made.world_size) == (2, 1, 8, 16)
    assert (made.resources.gpus, made.resources.accelerator, made.resources.memory_bytes) == (
        8,
        "A100-80GB",
        64 * 2**30,
    )
    assert (made.limits.max_runtime_s, made.limits.grace_s) == (86400, 60)
    assert (made.checkpoint.every_s, made.checkpoint.every_steps, made.checkpoint.keep) == (900, None, 3)
    assert made.inputs == {
        "train": Input(uri="s3://bucket/train/", mode="mount"),
        "more": Input(uri=f"{tmp_path}/data/", mode="copy"),
    }
    assert made.secrets == {"HF_TOKEN": ["aws-secretsmanager:hf", "env:HF_TOKEN"], "WANDB": ["file:/etc/w"]}
    assert made.environment.requirements == "requirements.txt"
    assert made.options["ssh"] == {"hosts": [{"address": "10.0.0.5", "user": "ml"}]}
    assert (made.retry.max_attempts, made.parallelism.strategy) == (5, "fsdp")


def test_the_trainer_is_told_true_and_false():
    """Some of its flags are on where they are not given."""
    made = Job.load("trainer: true\nhyperparameters: {bf16: true, assistant_only_loss: false, seed: null}")
    assert made.argv()[1:] == ["--bf16", "true", "--assistant_only_loss", "false"]


def test_the_least_file():
    made = Job.load("trainer: true")
    assert made.name == fit_name(Path.cwd().name)
    assert made.source == str(Path.cwd())
    assert made.entrypoint is None and made.argv() == [".cloudtrain/train.py"]
    assert (made.num_nodes, made.min_nodes, made.processes, made.target) == (1, None, 1, "local")
    assert (made.limits.max_runtime_s, made.limits.grace_s) == (24 * 3600, 30)
    assert (made.checkpoint.every_s, made.checkpoint.keep) == (900, 3)
    assert (made.parallelism.strategy, made.retry.max_attempts) == ("none", 1)
    assert made.retry.on_events == ["preempted", "lost", "capacity"]
    assert made.output is None and made.image is None and made.environment.requirements is None
    assert (made.resources.gpus, made.resources.accelerator, made.resources.memory_bytes) == (0, None, None)


def test_null_means_left_out():
    assert job("env:\nresources:\n  disk_gb:\noutput: ~\nnum_nodes: null\nrun:\nentrypoint: t.py") == job()


def test_numbers_reach_the_script_as_they_were_written():
    texts = ["3.0e-4", "1.10", "0x1F", "no", "0123", "1:30", "2026-11-20", "1e-4", "on", "1_000", "1."]
    lines = "".join(f"  k{number}: {text}\n" for number, text in enumerate(texts))
    flags = [word for number, text in enumerate(texts) for word in (f"--k{number}", text)]
    assert job(f"hyperparameters:\n{lines}").argv()[1:] == flags
    quoted = job("hyperparameters: {a: '1', b: 'true', c: [0.10, on]}")
    assert quoted.argv()[1:] == ["--a", "1", "--b", "true", "--c", "0.10", "on"]
    made = job(
        "env: {A: 0123, B: 1.10, C: yes, D: True, E: '', F: 1:30, G: ' x '}\nargs: [1.10, true, no, 0x1F]\nlabels: {v: 1.0}"
    )
    assert made.env == {"A": "0123", "B": "1.10", "C": "yes", "D": "True", "E": "", "F": "1:30", "G": " x "}
    assert made.args == ["1.10", "true", "no", "0x1F"]
    assert made.labels == {"v": "1.0"}


def test_account_numbers_keep_their_zeros():
    made = job("options: {sagemaker: {account: 012345678901, size: 10, zero: 0, x: 1.50}}")
    assert made.options["sagemaker"] == {"account": "012345678901", "size": 10, "zero": 0, "x": 1.5}


VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10)
SCALARS = VALUES | st.booleans() | st.none() | st.integers() | st.floats()


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "hyperparameters": st.dictionaries(
                st.from_regex("[a-z_]{1,5}", fullmatch=True),
                SCALARS | st.lists(SCALARS.filter(lambda v: v is not None and str(v)[:1] != "-"), max_size=3),
                max_size=4,
            ),
            "args": st.lists(VALUES, max_size=3),
            "env": st.dictionaries(st.from_regex("[B-L][A-Z]{0,3}", fullmatch=True), VALUES, max_size=3),
            "arg_style": st.sampled_from(["argparse", "hf", "hydra"]),
            "num_nodes": st.integers(1, 9),
            "resources": st.fixed_dictionaries(
                {}, optional={"use_spot": st.booleans(), "accelerators": st.sampled_from(["A100", "H100:8"])}
            ),
            "environment": st.fixed_dictionaries({}, optional={"requirements": st.sampled_from(["none", "r.txt"])}),
            "labels": st.dictionaries(VALUES, VALUES, max_size=2),
        },
    )
)
def test_a_plan_keeps_the_job_exactly(data):
    made = Job(**{"name": "x", "trainer": True, **data})
    stored = json.dumps(made.to_dict())
    again = Job.from_dict(json.loads(stored))
    assert again == made and again.argv() == made.argv()
    assert json.dumps(again.to_dict()) == stored


@pytest.mark.parametrize(
    "text",
    [WHOLE, "num_nodes: 2\nparallelism: {accelerate_config: a.yaml}", "resources: {use_spot: true}", "trainer: true"],
)
def test_a_plan_keeps_whole_files_exactly(text):
    made = Job.load(f"{text}\n{entry(text)}")
    assert Job.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_given_is_what_was_written():
    assert job("num_nodes: 2\nresources: {disk_gb: 5}\nenvironment: {requirements: none}").to_dict(given=True) == {
        "name": "x",
        "entrypoint": "t.py",
        "num_nodes": 2,
        "resources": {"disk_gb": 5},
        "environment": {"requirements": "none"},
    }


def test_python_says_the_same_as_the_file():
    made = Job(
        name="x",
        entrypoint="t.py",
        hyperparameters={"lr": 3e-4, "on": True, "path": Path("/a")},
        args=("a", "b"),
        env={"A": 1, "B": True},
        resources=Resources(accelerators="A100:2"),
        parallelism=Parallelism(strategy="fsdp"),
        limits=Limits(max_runtime="1h"),
        checkpoint=Checkpoint(every="10 steps"),
        environment=Environment(requirements="none"),
        inputs={"a": "s3://b/c", "b": Input(uri="s3://b/d")},
        retry=Retry(max_attempts=2),
        secrets={"S": "env:S"},
    )
    assert made.hyperparameters == {"lr": "0.0003", "on": True, "path": "/a"}
    assert (made.args, made.env, made.secrets) == (["a", "b"], {"A": "1", "B": "true"}, {"S": ["env:S"]})
    assert made.inputs["a"].mode == "copy" and made.limits.max_runtime_s == 3600
    assert Job.from_dict(made.to_dict()) == made
    with pytest.raises(BadJob) as caught:
        Resources(accelerator="A100", disk_gb="big")
    assert [problem.path for problem in caught.value.problems] == ["disk_gb", "accelerator"]
    with pytest.raises(BadJob):
        Job.model_validate({"name": "X"})
    with pytest.raises(Exception, match="frozen"):
        made.name = "y"


def test_a_mapping_is_not_changed():
    data = {"name": "x", "hyperparameters": {"a": 1}, "env": {"A": 1}}
    Job.from_dict(data)
    assert data == {"name": "x", "hyperparameters": {"a": 1}, "env": {"A": 1}}


def test_problems_of_others_get_their_lines(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "name: x\nresources:\n  use_spot: true\noptions:\n  ssh:\n    hosts:\n    - a: 1\n    - b: 2\nrun: x\n"
    )
    made = Job.load(tmp_path / "job.yaml").model_copy(update={"labels": {"user": "me"}})
    assert made.bind(["requirements.txt"]).located([Problem("m", "name")])[0].line == 1
    found = made.located(
        [
            Problem("m", path)
            for path in (
                "resources.use_spot",
                "options.ssh.hosts[1].b",
                "options.ssh.key",
                "image",
                "options.ssh.hosts[1].c",
            )
        ]
    )
    assert [(problem.line, problem.path) for problem in found] == [
        (3, "resources.use_spot"),
        (8, "options.ssh.hosts[1].b"),
        (5, "options.ssh.key"),
        (None, "image"),
        (8, "options.ssh.hosts[1].c"),
    ]
    assert {problem.file for problem in found} == {str(tmp_path / "job.yaml")}
    assert Job(name="x", run="x").located([Problem("m", "image")]) == [Problem("m", "image")]


def test_what_no_process_can_receive_is_refused():
    with pytest.raises(BadJob) as caught:
        Job(name="x", entrypoint="t.py", args=["a\0b"], env={"A": "\ud800"}, hyperparameters={"k\0": 1}, source="a\0")
    assert [(p.path, p.message.split(",")[0]) for p in caught.value.problems] == [
        ("args[0]", "holds a NUL character"),
        ("env.A", "holds half of a surrogate pair"),
        ("hyperparameters.k\\0", "holds a NUL character"),
        ("source", "holds a NUL character"),
    ]
    assert "hyperparameters.a: holds a NUL character, which no process can receive" in problems(
        'hyperparameters: {a: "\\0"}'
    )


def test_settings_over_the_file():
    sets = [
        "num_nodes=2",
        "hyperparameters.lr=1.10",
        "hyperparameters.opt.beta=0.90",
        "args=[a, 1.0]",
        "env.A=0123",
        "inputs.d=s3://b/c",
        "options.ssh.user=me",
        'hyperparameters.tag="true"',
        "hyperparameters.flag=true",
        "labels.a.b/c=d",
    ]
    made = job("hyperparameters: {lr: 1, opt: {beta: 1}}", sets)
    assert made.argv()[1:] == ["--lr", "1.10", "--opt.beta", "0.90", "--tag", "true", "--flag", "a", "1.0"]
    assert made.env == {"A": "0123"} and made.inputs["d"].uri == "s3://b/c" and made.labels == {"a.b/c": "d"}
    assert made.options == {"ssh": {"user": "me"}} and made.num_nodes == 2


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), VALUES, max_size=3), st.lists(VALUES, max_size=3))
def test_hostile_text_arrives_through_the_file_and_through_set(hyperparameters, args):
    data = {"name": "x", "entrypoint": "t.py", "hyperparameters": hyperparameters, "args": args}
    want = Job.from_dict(data).argv()
    assert Job.load(json.dumps(data)).argv() == want
    assert Job.load(json.dumps(data, ensure_ascii=False)).argv() == want
    sets = [f"hyperparameters.{key}={json.dumps(value)}" for key, value in hyperparameters.items()]
    assert Job.load("name: x\nentrypoint: t.py", [*sets, f"args={json.dumps(args)}"]).argv() == want


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "job.yaml").write_bytes(b"\x7fELF\x02\x01\x01\0\0\xff\xfe")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    cases = {
        tmp_path / "none.yaml": "there is no job file",
        tmp_path: "is a folder",
        tmp_path / "job.yaml": "job.yaml",
        "none.yaml": "there is no job file",
        tmp_path / "x\0y": "cannot be read",
        tmp_path / "loop.yaml": "cannot be read",
    }
    for path, message in cases.items():
        with pytest.raises(BadRequest, match=message) as caught:
            Job.load(path)
        assert caught.value.exit_code == 2


def test_odd_file_names(tmp_path):
    for name in ("a b.yaml", "it's.yaml", 'q"q.yaml', "new\nline.yaml", "a: b.yaml"):
        (tmp_path / name).write_text("name: x\nwrong: 1")
        with pytest.raises(BadJob) as caught:
            Job.load(str(tmp_path / name))
        assert caught.value.problems[0].file == str(tmp_path / name)


def test_the_schema_agrees_with_the_loader():
    import jsonschema
    import yaml

    made = schema()
    jsonschema.Draft202012Validator.check_schema(made)
    check = jsonschema.Draft202012Validator(made)
    good = [
        WHOLE,
        "trainer: true",
        "inputs: {a: s3://b/c}",
        "secrets: {A: 'env:A'}",
        "env: {A: 1, B: true}",
        "args: [1, a]",
        "labels: {a: 1}",
        "trainer: true\nparallelism: auto",
    ]
    for text in good:
        assert list(check.iter_errors(yaml.safe_load(text))) == []
        Job.load(f"{text}\n{entry(text)}")
    for text in (
        "nam: x",
        "num_nodes: 0",
        "resources: {use: 1}",
        "name: 'A b'",
        "inputs: {a: {ur: x}}",
        "parallelism: {strategy: x}",
        "secrets: {A: 1}",
    ):
        assert list(check.iter_errors(yaml.safe_load(text))), text
        with pytest.raises(BadJob):
            Job.load(text)


def test_the_schema_describes_every_key():
    made = schema()
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    models = {"Job": made, **made["$defs"]}
    assert set(models) >= {"Checkpoint", "Environment", "Input", "Limits", "Parallelism", "Resources", "Retry"}
    for name, model in models.items():
        parts = model["anyOf"][1] if "anyOf" in model else model
        for key, entry in parts["properties"].items():
            target = models.get(entry.get("$ref", "").rpartition("/")[2], {})
            assert entry.get("description") or target.get("description"), f"{name}.{key}"
    assert "default" not in made["$defs"]["Parallelism"]["properties"]["strategy"]


def test_importing_the_job_brings_nothing_heavy():
    heavy = ("torch", "rich", "click", "yaml", "tomllib", "difflib", "numpy")
    code = f"import cloudtrain.job.job, sys; print([name for name in {heavy} if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


# -- what packaging may let pass --------------------------------------------------------------------------------------


def test_exceptions_of_packaging_are_patterns_and_survive_the_round_trip():
    made = job("allow_secrets: [tests/keys/, '*.pem', '!prod.pem']\nallow_large: [data/]\nallow_pointers: [x]")
    assert made.exceptions == {
        "allow_secrets": ["tests/keys/", "*.pem", "!prod.pem"], "allow_large": ["data/"], "allow_pointers": ["x"],
    }  # fmt: skip
    assert Job.from_dict(json.loads(json.dumps(made.to_dict()))).exceptions == made.exceptions
    assert job("").exceptions == {"allow_secrets": [], "allow_large": [], "allow_pointers": []}
    assert "allow_secrets" not in job("").to_dict(given=True)


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("trainer: true", True),
        ("entrypoint: .cloudtrain/evaluate_model.py", True),
        ("entrypoint: .cloudtrain/trainer/pickled.py", True),
        ("run: python .cloudtrain/train.py --task lm", True),
        ("entrypoint: [python, .cloudtrain/train.py]", True),
        ("entrypoint: train.py", False),
        ("entrypoint: -m pkg.train", False),
        ("run: python train.py", False),
        ("entrypoint: train.py\nsetup: python .cloudtrain/train.py --help", True),
    ],
)
def test_a_job_says_whether_it_runs_the_shared_trainer(text, runs):
    assert job(text).runs_trainer is runs


@pytest.mark.parametrize("line", ["''", "'# no'", "'!'", "' '", '"a\\nb"'])
def test_exceptions_that_name_no_files_are_wrong(line):
    with pytest.raises(BadJob, match="allow_secrets.*can match no file"):
        job(f"allow_secrets: [a, {line}]")


def test_ctrl_c_at_any_line_of_writing_a_job_is_not_lost():
    """pydantic makes another error of what its calls of Python raise, or none: a submit went on that was cancelled."""
    written = job("inputs: {data: s3://bucket/data}\ntarget: local")
    line, left = 0, 0

    def trace(frame, event, _):
        nonlocal left
        left -= event == "line"
        if event == "line" and left == 0:
            raise KeyboardInterrupt
        return trace

    while left <= 0:
        line += 1
        left = line
        sys.settrace(trace)
        try:
            data = written.to_dict()
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(None)
        assert left > 0, f"the interrupt at line {line} is lost"
    assert line > 10 and data == written.to_dict()
