"""What a wrong job file is told: every problem at once, each with its line, in plain words."""

# ruff: noqa: E501 - a message stands on one line, as people see it

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from cloudtrain.backends.kubernetes.options import KubernetesOptions
from cloudtrain.cli import main
from cloudtrain.errors import BadJob, Problem
from cloudtrain.job.document import Document, read_yaml
from cloudtrain.job.job import Job
from cloudtrain.job.problems import dotted, explain, located, quote

# a job file (behind `name: x`) and all that is said about it
SAID = [
    ("nodes: 2", ["job.yaml:2: nodes: is not a known key (did you mean num_nodes?)"]),
    (
        "accelerators: A100",
        ["job.yaml:2: accelerators: is not a known key here (did you mean resources.accelerators?)"],
    ),
    (
        "checkpoint:\n  frequency: 3",
        ["job.yaml:3: checkpoint.frequency: is not a known key (choose from engine, every, folder, keep, required)"],
    ),
    ("num_nodes: two", ['job.yaml:2: num_nodes: must be a whole number, not the text "two"']),
    ("num_nodes: 2.5", ["job.yaml:2: num_nodes: must be a whole number, not the number 2.5"]),
    ("num_nodes: true", ["job.yaml:2: num_nodes: must be a whole number, not true"]),
    ("num_nodes: 0", ["job.yaml:2: num_nodes: must be at least 1, not the number 0"]),
    ("num_nodes: '2'", ['job.yaml:2: num_nodes: must be a whole number, not the text "2"']),
    (
        "resources:\n  use_spot: yes",
        [
            'job.yaml:3: resources.use_spot: must be true or false, not the text "yes" (write true; '
            "yes, no, on and off are text in YAML 1.2)"
        ],
    ),
    ("resources: A100:8", ['job.yaml:2: resources: must be a mapping (key: value), not the text "A100:8"']),
    (
        "resources: {accelerators: 8xA100}",
        ['job.yaml:2: resources.accelerators: must be a name and a count, not the text "8xA100" (write A100:8)'],
    ),
    (
        "resources: {accelerators: h100x8}",
        ['job.yaml:2: resources.accelerators: must be a name and a count, not the text "h100x8" (write h100:8)'],
    ),
    (
        "resources: {accelerators: A10G-4}",
        ['job.yaml:2: resources.accelerators: must be a name and a count, not the text "A10G-4" (write A10G:4)'],
    ),
    (
        "output: $HOME/runs",
        [
            'job.yaml:2: output: has a variable, which is not replaced: the text "$HOME/runs" '
            "(write the path itself; ~ is your home folder)"
        ],
    ),
    ("output: s3:/b/x", ['job.yaml:2: output: is a path of this machine: the text "s3:/b/x" (write s3://b/x)']),
    (
        "inputs: {data: gs//b/x}",
        ['job.yaml:2: inputs.data.uri: is a path of this machine: the text "gs//b/x" (write gs://b/x)'],
    ),
    (
        "resources: {accelerators: 'A100:0'}",
        ['job.yaml:2: resources.accelerators: must be a name and a count, not the text "A100:0" (write A100:8)'],
    ),
    ("resources: {memory: 64}", ["job.yaml:2: resources.memory: needs a unit: 64 (write 64GB or 64GiB)"]),
    (
        "resources: {memory: much}",
        ['job.yaml:2: resources.memory: is not a size: "much" (write a number and a unit: 500MB, 64GB, 64GiB or 1TB)'],
    ),
    ("limits: {max_runtime: 24}", ["job.yaml:2: limits.max_runtime: needs a unit: 24 (write 24s, 24m or 24h)"]),
    (
        "limits: {max_runtime: long}",
        [
            'job.yaml:2: limits.max_runtime: is not a duration: "long" (write a number and a unit: 90s, 15m, 24h, 7d or 1h30m)'
        ],
    ),
    ("checkpoint: {every: 500}", ['job.yaml:2: checkpoint.every: needs a unit: 500 (write "500 steps", 500s or 500m)']),
    (
        "checkpoint: {every: 0 steps}",
        [
            "job.yaml:2: checkpoint.every: is not a duration or a number of steps: the text "
            '"0 steps" (write 15m or "500 steps")'
        ],
    ),
    (
        "parallelism: {strategy: fdsp}",
        [
            "job.yaml:2: parallelism.strategy: must be one of none, ddp, fsdp, hsdp, zero1, zero2, "
            'zero3, auto, not the text "fdsp" (did you mean fsdp?)'
        ],
    ),
    ("args: --tag x", ['job.yaml:2: args: must be a list, not the text "--tag x"']),
    ("keep: out", ['job.yaml:2: keep: must be auto, none or a list, not the text "out" (write keep: [out])']),
    ("keep: no", ['job.yaml:2: keep: must be auto, none or a list, not the text "no" (write keep: none)']),
    ("keep: true", ["job.yaml:2: keep: must be auto, none or a list, not true (write keep: auto)"]),
    ("args:\n- a\n-", ['job.yaml:4: args[1]: has no value (write "" for an empty text)']),
    ("hyperparameters:\n- lr", ["job.yaml:2: hyperparameters: must be a mapping (key: value), not a list"]),
    ("hyperparameters:\n  --lr: 1", ["job.yaml:3: hyperparameters.--lr: write the name without its dashes: lr"]),
    (
        "hyperparameters:\n  x: 1\n  l: [-a, b]",
        ["job.yaml:4: hyperparameters.l: in a list, '-a' would be read as an option; pass the list through args"],
    ),
    (
        "hyperparameters: {a: {b: 1}, a.b: 2}",
        ["job.yaml:2: hyperparameters: a.b is given twice, once with a dot and once nested"],
    ),
    (
        "secrets:\n  HF_TOKEN: hf_thevalue",
        [
            "job.yaml:3: secrets.HF_TOKEN[0]: is not a source of a secret (never write the secret itself here) "
            "(write env:NAME, file:PATH, aws-secretsmanager:NAME, gcp-secretmanager:NAME, azure-keyvault:VAULT/KEY or k8s:NAME/KEY)"
        ],
    ),
    ("secrets: {A: []}", ["job.yaml:2: secrets.A: must not be empty"]),
    ("secrets: {A: 5}", ["job.yaml:2: secrets.A: must be a list, not what is written there"]),
    ("env: {A: [1]}", ["job.yaml:2: env.A: must be text, not a list"]),
    (
        "env:\n  RANK: 1\n  a-b: 1\n  CLOUDTRAIN_X: 1",
        [
            "job.yaml:3: env.RANK: is set by cloudtrain on every rank (choose another name)",
            "job.yaml:4: env.a-b: is not a valid name of an environment variable (use letters, digits "
            "and _; do not begin with a digit)",
            "job.yaml:5: env.CLOUDTRAIN_X: is set by cloudtrain on every rank (choose another name)",
        ],
    ),
    (
        "inputs: {a: {mode: copy}}",
        ["job.yaml:2: inputs.a: needs uri or run (write uri: s3://bucket/prefix/, or run: RUN)"],
    ),
    ("inputs: {a: ''}", ["job.yaml:2: inputs.a.uri: is empty (write a path or a URI such as s3://bucket/prefix)"]),
    (
        "inputs: {1a: s3://b}",
        [
            'job.yaml:2: inputs: has an invalid name: the text "1a" (use letters, digits, _ and -, starting with a letter)'
        ],
    ),
    (
        "inputs: {a-b: s3://b, a_b: s3://c}",
        ["job.yaml:2: inputs: has two names that become the same variable: a-b and a_b are both CLOUDTRAIN_INPUT_A_B"],
    ),
    (
        "metrics: {loss: '('}",
        [
            "job.yaml:2: metrics.loss: is not a valid regular expression: missing ), unterminated "
            'subpattern at position 0 (as in "loss=([0-9.e+-]+)")'
        ],
    ),
    (
        "metrics: {loss: 'loss=.*'}",
        ['job.yaml:2: metrics.loss: has no group for the number (put it in parentheses, as in "loss=([0-9.e+-]+)")'],
    ),
    (
        "retry: {on_events: [preempt]}",
        [
            "job.yaml:2: retry.on_events[0]: must be one of preempted, lost, capacity, not the text "
            '"preempt" (did you mean preempted?)'
        ],
    ),
    (
        "environment: {requirements: /etc/r.txt}",
        [
            'job.yaml:2: environment.requirements: must be a path inside the source, not the text "/etc/r.txt" '
            "(write it relative to the source, as in src/train.py)"
        ],
    ),
    (
        "source: git@host:a/b",
        [
            'job.yaml:2: source: is not a folder or a git address: the text "git@host:a/b" '
            "(write git+https://host/repo@rev or git+ssh://...)"
        ],
    ),
    (
        "entrypoint: train.py --lr 1",
        [
            'job.yaml:2: entrypoint: contains arguments: the text "train.py --lr 1" (put them into hyperparameters or args)'
        ],
    ),
    ("target: ''", ["job.yaml:2: target: must not be empty"]),
    ("options: {ssh: 1}", ["job.yaml:2: options.ssh: must be a mapping (key: value), not what is written there"]),
    ("num_nodes: 2\nnum_nodes: 3", ["job.yaml:3: the key 'num_nodes' is given twice (the first is in line 2 already)"]),
    (
        "num_nodes: 1\nmin_nodes: 2\nresources:\n  usespot: true\nlimits: {grace: x}\nenv: {A: "
        "1}\nsecrets: {A: 'env:A'}\nimage: [a]\nimage: b",
        [
            "job.yaml:3: min_nodes: is 2, more than num_nodes, 1",
            "job.yaml:5: resources.usespot: is not a known key (did you mean use_spot?)",
            'job.yaml:6: limits.grace: is not a duration: "x" (write a number and a unit: 90s, 15m, 24h, 7d or 1h30m)',
            "job.yaml:8: secrets.A: is given in env and in secrets (keep one of them)",
            "job.yaml:9: image: must be text, not a list",
            "job.yaml:10: the key 'image' is given twice (the first is in line 9 already)",
        ],
    ),
]


def test_the_file_of_another_tool_is_named_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {
        "SkyPilot": "resources: {accelerators: A100:8}\nworkdir: .\nfile_mounts: {/data: 's3://b/d'}\nenvs: "
        "{A: 1}\nrun: python train.py\n",
        "dstack": "type: task\npython: 3.12\ncommands:\n  - python train.py\nresources: {gpu: 24GB}\n",
    }
    short = {"SkyPilot": "workdir: .\nrun: python train.py\n", "dstack": "commands: [python train.py]\n"}
    plain = "envs: {A: 1}\nsetup: pip install numpy\nrun: python train.py\n"
    for tool, text in [*texts.items(), *short.items(), ("SkyPilot", plain)]:
        (tmp_path / "job.yaml").write_text(text)
        with pytest.raises(BadJob) as caught:
            Job.load("job.yaml")
        assert f"job.yaml: this is a {tool} file, and not a job file" in str(caught.value.problems[0])
        assert len(caught.value.problems) == 1
        assert f'the page "{"From SkyPilot" if tool == "SkyPilot" else "scripts"}"' in caught.value.problems[
            0
        ].hint and "known are" not in str(caught.value)


@pytest.mark.parametrize("kind, instead", [("MPIJob", "roles"), ("RayJob", "ray: true")])
def test_objects_of_other_operators_are_named_with_what_to_use(kind: str, instead: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(f"apiVersion: x/v1\nkind: {kind}\nmetadata: {{name: x}}\nspec: {{}}\n")
    with pytest.raises(BadJob) as caught:
        Job.load("job.yaml")
    (problem,) = caught.value.problems
    assert kind in problem.message and instead in problem.hint
    with pytest.raises(ValueError, match=instead):
        KubernetesOptions(kind=kind.lower())


def test_init_from_a_file_of_skypilot_names_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text("workdir: .\nrun: python train.py\n")
    assert main(["init", "--from", "task.yaml"]) == 2
    said = capsys.readouterr().err
    assert "this is a SkyPilot file" in said and "From SkyPilot" in said and "Python" not in said


def test_a_job_file_with_a_mistyped_env_is_not_one_of_another_tool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("source: .\nrun: python train.py\nenvs: {A: 1}\n")
    with pytest.raises(BadJob) as caught:
        Job.load("job.yaml")
    assert str(caught.value.problems[0]) == "job.yaml:3: envs: is not a known key (did you mean env?)"


def test_the_known_keys_are_listed_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("run: x\nqqq: 1\nzzz: 2\n")
    with pytest.raises(BadJob) as caught:
        Job.load("job.yaml")
    assert [problem.hint.startswith("choose from ") for problem in caught.value.problems] == [True, False]


@pytest.mark.parametrize(("text", "expected"), SAID, ids=[text.replace("\n", "|")[:40] for text, _ in SAID])
def test_what_is_said(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = "" if "entrypoint" in text else "run: x\n"
    (tmp_path / "job.yaml").write_text(f"name: x\n{text}\n{runs}")
    with pytest.raises(BadJob) as caught:
        Job.load("job.yaml")
    assert [str(problem) for problem in caught.value.problems] == expected
    assert caught.value.exit_code == 2


def test_values_that_may_be_secret_are_never_repeated():
    for text in (
        "secrets: {A: hunter2}",
        "secrets: {A: [hunter2]}",
        "secrets: hunter2",
        "env: {A: {b: hunter2}}",
        "options: {ssh: hunter2}",
    ):
        with pytest.raises(BadJob) as caught:
            Job.load(f"name: x\n{text}")
        assert "hunter2" not in str(caught.value), text


def test_a_value_that_looks_like_a_credential_is_not_repeated():
    key = "hf_" + "aB3" * 12
    with pytest.raises(BadJob, match="what looks like a credential") as caught:
        Job.load(f"num_nodes: {key}")
    assert key not in str(caught.value)


def test_long_values_are_cut():
    with pytest.raises(BadJob) as caught:
        Job.load("num_nodes: " + "x" * 5000)
    assert len(str(caught.value)) < 300


class Host(BaseModel):
    model_config = ConfigDict(extra="forbid")
    address: str
    port: int = 22


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    hosts: list[Host] = []
    key: str | None = None
    by_name: dict[str, Host] = {}


def test_a_backends_own_options_are_explained_alike():
    document = read_yaml(
        "options:\n  ssh:\n    hosts:\n    - adress: a\n    - address: b\n      port: x\n    keys: 1\n    key: 5\n",
        "job.yaml",
    )
    with pytest.raises(ValidationError) as caught:
        Options.model_validate(document.value["options"]["ssh"])
    assert [str(problem) for problem in explain(caught.value, Options, document, ("options", "ssh"))] == [
        "job.yaml:4: options.ssh.hosts[0].address: is missing",
        "job.yaml:4: options.ssh.hosts[0].adress: is not a known key (did you mean address?)",
        'job.yaml:6: options.ssh.hosts[1].port: must be a whole number, not the text "x"',
        "job.yaml:7: options.ssh.keys: is not a known key (did you mean key?)",
        "job.yaml:8: options.ssh.key: must be text, not what is written there",
    ]
    with pytest.raises(ValidationError) as caught:
        Options.model_validate({"by_name": {"a": {"address": "b", "prt": 1}}})
    assert [str(problem) for problem in explain(caught.value, Options)] == [
        "by_name.a.prt: is not a known key (did you mean port?)"
    ]


def test_places():
    document = read_yaml("a:\n  b:\n  - 1\n  - c: 2\nx.y: 3", "f")
    found = [
        located(Problem("m", path), document).line
        for path in ("a", "a.b[0]", "a.b[1].c", "a.b[1].d.e[3]", "x.y", "q", "")
    ]
    assert found == [1, 3, 4, 4, 5, None, None]
    assert located(Problem("m", "a", line=9, file="g"), document).line == 9
    assert located(Problem("m", "a"), None) == Problem("m", "a")
    assert located(Problem("m", "a"), Document.of({"a": 1}, "Job")) == Problem("m", "a", file="Job")
    assert dotted(("a", 0, "b", 1, 2)) == "a[0].b[1][2]"


def test_how_values_are_called():
    values = [None, True, 1, 0.5, "x", ["x"], {"x": 1}, object()]
    assert [quote(value) for value in values] == [
        "nothing",
        "true",
        "the number 1",
        "the number 0.5",
        'the text "x"',
        "a list",
        "a mapping",
        "a value of type object",
    ]
