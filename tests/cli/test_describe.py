"""plan, init, package, schema and doctor: what is said before anything runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from cloudtrain.backends import registry
from cloudtrain.backends.api import Plan
from cloudtrain.cli.view.planned import shorten
from cloudtrain.history.store import Store
from cloudtrain.job.job import Job

# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_json_is_the_plan(cli, project):
    shown = cli("plan", "train.py", "--json", "--nodes", "2", "--", "--lr", "1e-4")
    plan = Plan.from_json(shown.out)
    assert {"backend", "run_id", "request", "bundle", "manifest", "job"} <= shown.json.keys()
    assert (plan.backend, plan.manifest["nodes"], list(plan.manifest["argv"])) == (
        "local",
        2,
        ["train.py", "--lr", "1e-4"],
    )


def test_plan_for_people_is_a_summary_a_next_command_and_the_request_where_it_is_asked_for(cli, project):
    words = ("train.py", "--set", "limits.max_runtime=90s", "--set", "env.MINE=1")
    shown = cli("plan", *words, "--request", "--", "--verbose")
    whole = [line for line in cli("plan", *words, "--", "--verbose").out.splitlines() if not line.startswith("train-")]
    submit = "  next    cloudtrain submit train.py --set limits.max_runtime=90s --set env.MINE=1 -- --verbose"
    assert whole[-1] == submit and all(line in shown.out for line in whole) and "request" not in "".join(whole)
    head, told, request = shown.out.partition(
        "request (--verbose has 8 more values: the launcher's variables, long texts):\n"
    )
    assert told and "would go to local" in head and "at most 1m 30s" in head and "train.py" in head
    (node,) = json.loads(request)["nodes"]
    assert node["argv"][1:] == [".cloudtrain/launch.py"] and "CLOUDTRAIN_" not in request
    assert "\x1b" not in shown.out
    verbose = cli("plan", "train.py", "--key", "k", "--verbose").out
    manifest, _, whole = verbose.partition("encoded):\n")[2].partition("\nrequest:\n")
    assert json.loads(manifest) == cli("plan", "train.py", "--key", "k", "--json").json["manifest"]
    assert json.loads(whole) == cli("plan", "train.py", "--key", "k", "--json").json["request"]


def test_verbose_prints_a_batch_script_line_by_line_and_the_login_with_its_user(cli, project):
    (project / "cloudtrain.toml").write_text(
        '[targets.uni]\nbackend = "slurm"\nfolder = "/s"\nlogin = {address = "login.uni.example", user = "mk"}\n'
    )
    words = ("plan", "train.py", "-t", "uni", "--key", "k")
    request = cli(*words, "--json").json["request"]
    shown, told, script = cli(*words, "--verbose").out.partition("\nscript of the request:\n")
    assert told and script == request["script"].rstrip("\n") + "\n" and script.startswith("#!")
    assert "lines, printed below" in shown and request["login"] == "mk@login.uni.example"


def test_copies_that_do_not_know_each_other_are_named(cli, project):
    (project / "train.py").write_text("import torch\nprint(torch.ones(1))\n")
    words = ("plan", "train.py", "--nodes", "2", "--processes", "4")
    note = "8 copies of train.py run independently"
    assert note in cli(*words).out and "copies of" not in cli("plan", "train.py").out
    (project / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    assert note not in cli(*words).out


def test_gpus_without_a_rank_are_named(cli, project):
    (project / "cloudtrain.toml").write_text('[targets.uni]\nbackend = "slurm"\nfolder = "/s"\n')
    (project / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    words = ("plan", "train.py", "-t", "uni", "--nodes", "2", "--gpus", "A100:8")
    note = "2 processes on the 8 GPUs of a node: 6 of them are idle, unless a process itself uses several"
    shown = cli(*words, "--processes", "2")
    assert shown.code == 0 and note in " ".join(shown.out.split())
    assert "1 process on the 8 GPUs of a node: 7 of" in " ".join(cli(*words, "--processes", "1").out.split())
    for more in ((), ("--processes", "8"), ("--processes", "16")):
        assert "idle" not in cli(*words, *more).out
    assert "idle" not in cli("plan", "train.py", "-t", "uni", "--processes", "2").out  # no GPUs were asked for


def test_an_accelerate_file_that_makes_separate_trainings_on_cpu_is_named(cli, project):
    (project / "fsdp.yaml").write_text("distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\n")
    (project / "cpu.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")

    def noted(*words: str, options: tuple[str, ...] = ()) -> str:
        shown = cli("plan", *options, "--", "accelerate", "launch", *words, "train.py")
        assert shown.code == 0
        return " ".join(shown.out.split())

    note = "on a machine without GPUs its 2 processes do not know each other and each trains by itself"
    assert f"accelerate launch with fsdp.yaml of type FSDP: {note}" in noted("--config_file", "fsdp.yaml")
    assert f"with --multi_gpu: {note}" in noted("--multi_gpu", "--num_processes", "2")
    for words in (
        ("--config_file", "cpu.yaml"),
        ("--config_file", "missing.yaml"),
        ("--config_file", "fsdp.yaml", "--num_processes", "1"),
        ("--config_file", "fsdp.yaml", "--cpu"),
    ):
        assert "know each other" not in noted(*words)
    for options in (("--env", "ACCELERATE_USE_CPU=true"), ("--gpus", "A100:2", "-t", "uni")):
        (project / "cloudtrain.toml").write_text('[targets.uni]\nbackend = "slurm"\nfolder = "/s"\n')
        assert "know each other" not in noted("--config_file", "fsdp.yaml", options=options)


def test_a_number_of_checkpoints_that_no_script_reads_is_named(cli, project):
    def noted(*words: str) -> bool:
        return "checkpoint.keep is 2, but nothing in the source reads it" in " ".join(cli("plan", *words).out.split())

    two = ("--set", "checkpoint.keep=2")
    assert noted("train.py", *two) and not noted("train.py", "--set", "checkpoint.every=5m")
    assert noted(*two, "--", "python", "train.py")
    ours = "cloudtrain_runtime.TrainerCheckpoints(trainer)"
    for reads in (
        "import os\nkeep = os.environ['CLOUDTRAIN_CHECKPOINT_KEEP']",
        "keep = context().checkpoint_keep",
        ours,
    ):
        (project / "train.py").write_text(reads)
        assert not noted("train.py", *two)
    (project / "ours.yaml").write_text("trainer: true\nhyperparameters: {dataset: python-stdlib}\n")
    assert not noted("ours.yaml", *two)
    (project / "train.py").write_text("import transformers")
    assert noted("train.py", *two) and not noted("train.py", *two, "--set", "checkpoint.engine=cloudtrain")


@pytest.mark.parametrize(
    ("text", "words", "note"),
    [
        ("import transformers", ["train.py"], ""),
        ("from trl import SFTTrainer", ["train.py"], ""),
        ("import torch", ["train.py"], "nothing in the source imports transformers or trl"),
        ("import torch", ["--", "trl", "sft"], ""),
        ("", ["ours.yaml"], "the shared trainer writes its own checkpoints"),
    ],
)
def test_an_engine_of_checkpoints_that_serves_nothing_is_named(cli, project, text: str, words: list[str], note: str):
    (project / "train.py").write_text(text)
    (project / "ours.yaml").write_text("trainer: true\nhyperparameters: {dataset: python-stdlib}\n")
    shown = " ".join(
        cli("plan", "--set", "checkpoint.engine=cloudtrain", "--set", "retry.max_attempts=3", *words).out.split()
    )
    assert bool(re.search(r"checkpoint\.engine (is|changes)", shown)) == bool(note) and note in shown
    assert "no code in the source seems to load a checkpoint" not in shown


def test_a_shortened_request_has_all_that_a_person_would_check():
    request = {
        "spec": {"env": [{"name": "CLOUDTRAIN_NODE_RANK", "value": "1"}, {"name": "MINE", "value": "2"}]},
        "HyperParameters": {"ct_manifest_0": "eNq", "lr": "1e-4"},
        "sdl": {"env": ["CLOUDTRAIN_MANIFEST_0=eNq", "MINE=2"]},  # as Akash writes variables
        "script": "x" * 1000,
        "count": 3,
        "none": [],
    }
    assert shorten(request) == (
        {
            "spec": {"env": [{"name": "MINE", "value": "2"}]},
            "HyperParameters": {"lr": "1e-4"},
            "sdl": {"env": ["MINE=2"]},
            "script": "x" * 400 + "... (1,000 characters)",
            "count": 3,
            "none": [],
        },
        4,
    )


def test_plan_into_a_file(cli, project):
    shown = cli("plan", "train.py", "-o", "my plan.json", "--key", "k")
    plan = Plan.from_json(Path("my plan.json").read_text())
    assert plan.run_id in shown.out
    assert shown.out.endswith("  written  my plan.json\n  next     cloudtrain submit 'my plan.json'\n")
    assert cli("plan", "train.py", "-o", "-", "--key", "k").json["run_id"] == plan.run_id
    assert cli("plan", "my plan.json", "--json").out == Path("my plan.json").read_text()


def test_plan_stores_no_run(cli, project):
    cli("plan", "train.py")
    assert cli("ls", "--json").json == []


def test_the_target_of_the_command_line_wins(cli, project):
    (project / "cloudtrain.toml").write_text('[targets.near]\nbackend = "local"\npython = "/opt/python"\n')
    (project / "job.yaml").write_text("entrypoint: train.py\ntarget: local\n")
    plan = cli("plan", "-t", "near", "--json").json
    assert (plan["target"], plan["backend"]) == ("near", "local")
    assert plan["request"]["nodes"][0]["argv"][0] == "/opt/python"
    assert "near (local)" in cli("plan", "-t", "near").out


# -- init -------------------------------------------------------------------------------------------------------------


def test_init_writes_a_job_that_is_one(cli, project):
    shown = cli("init")
    assert shown.code == 0 and "job.yaml  runs train.py" in shown.out
    text = Path("job.yaml").read_text()
    assert text.splitlines()[0] == "# yaml-language-server: $schema=job.schema.json"
    jsonschema.validate(yaml.safe_load(text), json.loads(Path("job.schema.json").read_text()))
    job = Job.load("job.yaml")
    assert (job.entrypoint, job.source, job.name) == ("train.py", str(project), "project")
    assert cli("plan", "--json").json["manifest"]["argv"] == ["train.py"]


PAGE = (Path(__file__).parents[2] / "docs" / "how" / "trainer-spot.md").read_text()


def test_init_writes_the_five_lines_of_the_page_for_a_script_of_the_trainer(cli, tmp_path, monkeypatch):
    script, job = (re.search(rf'```{kind} title="[^"]*"\n(.*?)```', PAGE, re.DOTALL)[1] for kind in ("python", "yaml"))
    (tmp_path / "trainer").mkdir()
    monkeypatch.chdir(tmp_path / "trainer")
    Path("train.py").write_text(script)
    Path("cloudtrain.toml").write_text('[targets.prod]\nbackend = "kubernetes"\n')
    assert cli("init", "-t", "prod").code == 0
    assert Path("job.yaml").read_text().splitlines()[1:] == job.splitlines()
    assert cli("init", "--force").code == 0 and cli("plan", "--json").code == 0


@pytest.mark.parametrize(
    ("script", "args"),
    [
        ("from accelerate import Accelerator\n", []),
        ("import lightning as L\n", []),
        ("    from pytorch_lightning import Trainer\n", []),
        ("from transformers import (\n    AutoModel,\n    Seq2SeqTrainer,\n)\n", []),
        ("from transformers import AutoModel\n# accelerate\n", None),
        ("import torch\n", None),
    ],
)
def test_init_knows_a_library_by_its_import(cli, project, script, args):
    Path("train.py").write_text(script)
    assert cli("init").code == 0
    assert yaml.safe_load(Path("job.yaml").read_text()).get("args") == args


def test_init_never_writes_over_a_file(cli, project):
    Path("job.yaml").write_text("mine")
    shown = cli("init")
    assert shown.code == 2 and "already exists" in shown.err and "--force" in shown.err
    assert Path("job.yaml").read_text() == "mine"
    assert not Path("job.schema.json").exists()
    (project / "cloudtrain.toml").write_text('[targets.prod]\nbackend = "kubernetes"\n')
    added = cli("init", "-t", "prod")
    assert added.code == 0 and "left as it is" in added.out and "cloudtrain plan job.yaml -t prod" in added.out
    assert Path("job.yaml").read_text() == "mine" and not Path("job.schema.json").exists()
    for kept in ("job.yaml.old", "job.yaml.old1"):
        before = Path("job.yaml").read_text()
        assert cli("init", "--force").code == 0 and Path(kept).read_text() == before
    assert Path("job.yaml.old").read_text() == "mine"
    os.remove("job.yaml")
    os.symlink("nowhere", "job.yaml")  # a link that leads nowhere is something too
    assert cli("init").code == 2


def test_init_writes_a_target_of_what_can_be_found_out(cli, tmp_path, monkeypatch):
    from cloudtrain.backends.ssh.backend import SshBackend

    monkeypatch.chdir(tmp_path)
    found = {"hosts": [{"address": 'o"ne', "user": "ml"}, {"address": "two"}], "port": 22}
    monkeypatch.setattr(SshBackend, "discover", classmethod(lambda cls: found))
    (tmp_path / "cloudtrain.toml").write_text("[defaults]\nnum_nodes = 2")
    shown = cli("init", "-t", "ssh")
    assert shown.code == 0 and "[targets.ssh] in cloudtrain.toml: hosts, port" in shown.out
    text = (tmp_path / "cloudtrain.toml").read_text()
    read = tomllib.loads(text)
    assert read == {"defaults": {"num_nodes": 2}, "targets": {"ssh": {"backend": "ssh", **found}}}
    assert Job.load("job.yaml").target == "ssh" and "options" not in Path("job.yaml").read_text()
    assert cli("init", "-t", "ssh", "--force").code == 0
    assert (tmp_path / "cloudtrain.toml").read_text() == text, "a target that is there is left alone"
    shown = cli("init", "-t", "local", "-o", "near.yaml")
    assert shown.code == 0 and "[targets" not in shown.out, "nothing to find out, nothing to write"


def test_init_for_a_cloud_whose_sdk_is_missing_says_so_and_writes_nothing(cli, project, monkeypatch):
    before = sorted(project.iterdir())
    monkeypatch.setitem(sys.modules, "boto3", None)
    shown = cli("init", "-t", "sagemaker")
    assert shown.code == 2 and "pip install 'cloudtrain[sagemaker]'" in shown.err
    assert sorted(project.iterdir()) == before
    monkeypatch.undo()


def test_init_without_an_account_says_that_no_target_is_written(cli, project, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nothing")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nothing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    shown = cli("init", "-t", "sagemaker")
    assert shown.code == 0 and "cloudtrain found no credentials for the account of sagemaker" in shown.err


def test_init_finds_the_script(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.py").touch()
    assert "uses the shared trainer" in cli("init", "-o", "a.yaml").out
    (tmp_path / "fit.py").touch()
    assert "runs fit.py" in cli("init", "-o", "b.yaml").out
    (tmp_path / "other.py").touch()
    shown = cli("init", "-o", "c.yaml")
    assert shown.code == 2 and "fit.py, other.py" in shown.err
    (tmp_path / "main.py").touch()
    assert "runs main.py" in cli("init", "-o", "d.yaml").out
    assert "uses the shared trainer" in cli("init", "-o", "e.yaml", "--trainer").out
    assert "runs other.py" in cli("init", "other.py", "-o", "f.yaml").out
    for name in "abdef":
        Job.load(f"{name}.yaml")


@pytest.mark.parametrize("name", ["my train.py", "no", "#x.py", "ü.py", "a: b.py", "@x.py"])
def test_init_quotes_what_yaml_would_misread(cli, project, name):
    (project / name).write_text("#!/usr/bin/env python3\n")
    assert cli("init", f"./{name}").code == 0
    assert Job.load("job.yaml").entrypoint == name


def test_init_for_a_script_elsewhere_is_refused(cli, project, tmp_path):
    (tmp_path / "far.py").touch()
    shown = cli("init", tmp_path / "far.py")
    assert shown.code == 2 and "is outside" in shown.err


def test_init_knows_targets(cli, project):
    (project / "cloudtrain.toml").write_text('[targets.near]\nbackend = "local"\n')
    assert cli("init", "-t", "near").code == 0
    assert Job.load("job.yaml").target == "near"
    assert cli("init", "-t", "far", "--force").code == 2


def test_the_shared_trainer_knows_what_init_writes(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli("init")
    argv = cli("plan", "--json").json["manifest"]["argv"]
    assert argv[0] == ".cloudtrain/train.py"
    script = "import sys; from trainer.arguments import parse; parse(sys.argv[1:])"
    entrypoints = Path(__file__).parents[2] / "entrypoints"
    subprocess.run([sys.executable, "-c", script, *argv[1:]], check=True, cwd=entrypoints)


# -- files ------------------------------------------------------------------------------------------------------------


def test_package_list_json(cli, project):
    (project / "data").mkdir()
    (project / "data" / "x.txt").write_text("four")
    data = cli("plan", "--files", "--json").json
    assert {"path": "data/x.txt", "size": 4} in data["files"]
    assert data["sha256"] == cli("plan", "train.py", "--json").json["bundle"]["sha256"]
    assert len(cli("plan", ".", "--files", "--json").json["files"]) == 2


def test_package_for_people(cli, project):
    shown = cli("plan", "--files")
    assert "train.py" in shown.out and "1 files" not in shown.out and "sha256" in shown.out


def test_package_says_why(cli, project):
    (project / ".cloudtrainignore").write_text("*.bin\n")
    (project / "big.bin").write_text("x")
    out = cli("plan", "--why", "big.bin").out
    assert "big.bin" in out and ".cloudtrainignore" in out
    assert cli("plan", "--why", "train.py", "--json").json["path"] == "train.py"


def test_package_of_a_job_is_its_source(cli, project, tmp_path):
    (project / "src").mkdir()
    (project / "src" / "train.py").write_text("print(1)\n")
    (project / "job.yaml").write_text("source: src\nentrypoint: train.py\n")
    for words in ([], ["job.yaml"], ["src"]):
        assert [file["path"] for file in cli("plan", *words, "--files", "--json").json["files"]] == ["train.py"]


TOKEN = "hf_" + "aB3" * 12
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 5\n"


def test_package_refuses_credentials_in_one_screen_and_the_list_is_still_shown(cli, project):
    (project / "conf.py").write_text(f"\ntoken = '{TOKEN}'\n")
    (project / "model.bin").write_text(POINTER)
    for words in (["plan", "train.py"], ["submit", "train.py"], ["plan", "--files"]):
        shown = cli(*words)
        assert shown.code == 2
        assert "credentials in 1 file:\n  conf.py:2  Hugging Face token" in shown.err
        assert "Git-LFS pointers instead of the files in 1 file:\n  model.bin:1" in shown.err
        assert "allow_secrets:" in shown.err and "git lfs pull" in shown.err
        assert TOKEN not in shown.out + shown.err
        assert ("       " in shown.out and "model.bin" in shown.out) is ("--files" in words)
    assert "conf.py:2" in cli("plan", "--files", "--json").json["error"]
    assert "refused: line 2: Hugging Face token" in cli("plan", "--why", "conf.py").out
    assert "refused: it is a Git-LFS pointer" in cli("plan", "--why", "model.bin").out


def test_what_the_job_allows_is_packaged(cli, project):
    (project / "conf.py").write_text(f"\ntoken = '{TOKEN}'\n")
    (project / "model.bin").write_text(POINTER)
    text = "entrypoint: train.py\nallow_secrets: [conf.py]\nallow_pointers: ['*.bin']\n"
    (project / "job.yaml").write_text(text)
    assert cli("plan", "--files").code == 0
    assert "refused" not in cli("plan", "--why", "conf.py").out
    plan = cli("plan", "--json").json
    assert plan["job"]["allow_secrets"] == ["conf.py"] and plan["job"]["allow_pointers"] == ["*.bin"]
    assert cli("plan", "--set", "allow_secrets=[nothing]").code == 2
    wrong = cli("plan", "--set", "allow_secrets=['#']")
    assert wrong.code == 2 and "allow_secrets" in wrong.err and "that can match no file" in wrong.err


def test_what_looks_like_a_key_in_the_job_is_refused_all_at_once(cli, project, home):
    other = "AKIA" + "ABCDEFGHIJKLMNOP"  # in two parts: this file is packaged too
    job = f"entrypoint: train.py\nhyperparameters: {{api_key: {TOKEN}}}\nargs: [--lr, '1', --token={TOKEN}]\n"
    (project / "job.yaml").write_text(f"{job}setup: |\n  export AWS_ACCESS_KEY_ID={other}\n")
    secret = "/".join(["a1B2c3D4e5"] * 4)[:40]
    sets = ["--set", f"env.HF_TOKEN={TOKEN}", "--set", f"env.AWS_SECRET_ACCESS_KEY={secret}"]
    allowed = ["--set", "allow_secrets=[job.yaml, env.*, args, setup, hyperparameters.api_key]"]
    for command in ("plan", "submit"):
        shown = cli(command, *sets, "--set", "num_nodes=2", "--", "--aws_secret_access_key", secret)
        assert shown.code == 2, shown.err
        for place in (
            "env.HF_TOKEN",
            "env.AWS_SECRET_ACCESS_KEY",
            "hyperparameters.api_key",
            "args[2]",
            "args[4]",
            "setup",
        ):
            assert f"{place} looks like a credential: " in shown.err.replace(": looks", " looks"), (place, shown.err)
        assert "secrets.HF_TOKEN: env:HF_TOKEN" in shown.err and "allow_secrets: [env.HF_TOKEN]" in shown.err
        assert not [value for value in (TOKEN, other, secret) if value in shown.out + shown.err]
    assert not Store(home).runs()
    assert cli("plan", *sets, *allowed).code == 0
    shown = cli("plan", "--set", f"args={TOKEN}", "--set", f"num_nodes={TOKEN}")
    assert shown.code == 2 and "args must be a list" in shown.err.replace(": must", " must") and TOKEN not in shown.err


def test_a_token_for_pip_and_a_literal_token_are_refused_with_the_place_where_they_belong(cli, project, home):
    (project / "job.yaml").write_text("entrypoint: train.py\n")
    url, token = "https://u:" + "TOK3Nsecret99xyz@idx.acme.org/simple", "TOK3Nsecret99xyz" + "ABCDEFGH"
    for name, value in (("PIP_EXTRA_INDEX_URL", url), ("ACME_TOKEN", token)):
        shown = cli("submit", "--set", f"env.{name}={value}")
        assert shown.code == 2 and f"env.{name}" in shown.err and "looks like a credential" in shown.err
        assert f"secrets.{name}: env:{name}" in shown.err and "TOK3N" not in shown.out + shown.err
    (project / "requirements.txt").write_text(f"--index-url {url}\nnumpy\n")
    shown = cli("submit")
    assert shown.code == 2 and "requirements.txt:1  password in the URL of a package index" in shown.err
    assert "TOK3N" not in shown.out + shown.err and not Store(home).runs()


def test_a_large_file_is_named_with_its_size_and_allowed_by_a_setting(cli, project, monkeypatch):
    monkeypatch.setattr("cloudtrain.source.limits.MAX_FILE", 2_000_000)
    (project / "weights.bin").write_bytes(b"\0" * 2_500_000)
    shown = cli("plan", "train.py")
    assert shown.code == 2 and "1 file over 2 MB:\n     2.5 MB  weights.bin" in shown.err
    assert "it has 2.5 MB, and 2 MB are the most" in cli("plan", "--why", "weights.bin").out
    assert cli("plan", "train.py", "--set", "allow_large=[weights.bin]").code == 0


# -- schema and doctor ------------------------------------------------------------------------------------------------


def test_schema(cli, project):
    shown = cli("init", "--schema")
    jsonschema.Draft202012Validator.check_schema(shown.json)
    assert cli("init", "--schema", "-o", "s.json").code == 0
    assert Path("s.json").read_text() == shown.out


def test_doctor_finds_this_machine_fit(cli, project):
    shown = cli("doctor", "--json")
    rows = {row["what"]: row for row in shown.json}
    assert {"cloudtrain", "python", "git", "home", "torch", "backend local"} <= rows.keys()
    assert shown.code == (1 if any(row["ok"] is False for row in rows.values()) else 0)
    assert rows["backend local"]["ok"] is True
    assert "ready" in cli("doctor").out


def test_doctor_names_what_stands_in_the_way(cli, project, monkeypatch):
    (project / "cloudtrain.toml").write_text('[targets.near]\nbackend = "local"\npython = "/nowhere/python"\n')
    shown = cli("doctor", "near")
    assert shown.code == 1
    assert "PROBLEM" in shown.out and "/nowhere/python" in shown.out and "1 problem" in shown.out
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install git" in cli("doctor").out


def test_doctor_checks_several_targets(cli, project):
    tables = [f'[targets.{name}]\nbackend = "local"\npython = "/nowhere/{name}"\n' for name in ("a", "b", "c")]
    (project / "cloudtrain.toml").write_text("".join(tables))
    shown = cli("doctor", "c", "-t", "a", "-t", "b", "-t", "a", "--json")
    problems = [row["what"] for row in shown.json if row["what"].startswith("target ")]
    assert shown.code == 1 and problems == ["target c", "target a", "target b"]
    assert sum(row["what"] == "git" for row in shown.json) == 1, "this machine once"


def test_doctor_reports_a_target_that_cannot_be_reached_and_checks_the_others(cli, project):
    (project / "cloudtrain.toml").write_text(
        '[targets.lab]\nbackend = "slurm"\nfolder = "/x"\nlogin = {address = "127.0.0.1", port = 9}\n'
        '[targets.near]\nbackend = "local"\nusd_per_hour = 3\n'
    )
    (project / "job.yaml").write_text("name: a\nentrypoint: train.py\n")
    shown = cli("doctor", "-t", "lab", "-t", "near", "--job", "job.yaml", "--json")
    (lab,) = [row for row in shown.json if row["what"] == "target lab"]
    assert shown.code == 1 and lab["ok"] is False and "127.0.0.1" in lab["said"]
    assert {row["what"]: row["ok"] for row in shown.json}["target near"] is True


def test_doctor_checks_cloudtrain_toml_offline(cli, project):
    file = project / "cloudtrain.toml"
    file.write_text(
        '[targets.a]\nbackend = "slrum"\n[targets.b]\nbackend = "vertex"\nprojct = "p"\nimag = "i"\npriced_as = "x"\n'
        '[targets.c]\nbackend = "ssh"\nhosts = "one"\n[targets.d]\nbackend = "slurm"\n'
    )
    shown = cli("doctor", "--json")
    problems = [(row["what"], row["said"], row["hint"]) for row in shown.json if row["ok"] is False]
    assert shown.code == 1 and [what for what, *_ in problems] == ["target a", "target b", "target b", "target c"]
    assert problems[0][1:] == (f"{file}:1: targets.a.backend: there is no backend 'slrum'", "did you mean slurm?")
    assert problems[1][1:] == (f"{file}:5: targets.b.projct: is not a known key", "did you mean project?")
    assert "targets.c.hosts: must be a list" in problems[3][1]
    rows = cli("doctor", "c", "--json").json
    assert {row["what"]: row["said"] for row in rows if row["ok"] is None}["target c"].startswith("not checked")
    file.write_text('[targts.x]\nbackend = "local"\n')
    shown = cli("doctor", "--json")
    (row,) = [row for row in shown.json if row["ok"] is False]
    assert shown.code == 1 and row["what"] == "config" and "targts: is not a known table" in row["said"]


def test_doctor_checks_the_target_that_the_configuration_gives_jobs(cli, project):
    (project / "cloudtrain.toml").write_text('[defaults]\ntarget = "devv"\n\n[targets.dev]\nbackend = "local"\n')
    assert cli("doctor").code == 2, "as with the name as its argument"
    (project / "cloudtrain.toml").write_text(
        '[defaults]\ntarget = ["dev", "local"]\n\n[targets.dev]\nbackend = "local"\n'
    )
    right = cli("doctor", "--json")
    assert right.code == 0 and {"target dev", "backend local"} <= {finding["what"] for finding in right.json}


def test_doctor_with_a_job_checks_the_target_of_that_job(cli, project):
    (project / "cloudtrain.toml").write_text('[targets.near]\nbackend = "local"\n')
    (project / "job.yaml").write_text("name: a\nentrypoint: train.py\ntarget: near\n")
    rows = {row["what"]: row for row in cli("doctor", "--job", "job.yaml", "--json").json}
    assert "target near" in rows and "backend local" not in rows and rows["job job.yaml"]["said"] == "planned on near"


def test_doctor_reports_a_history_that_cannot_be_used(cli, home):
    home.mkdir()
    (home / "history.sqlite3").mkdir()
    shown = cli("doctor")
    assert shown.code == 1 and "history" in shown.out and "Traceback" not in shown.err


def test_doctor_of_a_backend_whose_extra_is_missing(cli, monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN, "far", ("a_module_that_is_not_there:Backend", "far"))
    shown = cli("doctor", "far")
    assert shown.code == 2 and "pip install 'cloudtrain[far]'" in shown.err


@pytest.mark.parametrize(
    ("text", "variables", "found"),
    [
        ('webhook = "env:HOOK"', {}, [False]),
        ('webhook = "env:HOOK"', {"HOOK": "https://example.com/x"}, [True]),
        ('webhook = "https://example.com/x"', {}, []),
        ('command = "notify-send"', {}, []),
    ],
)
def test_doctor_knows_whether_a_webhook_has_its_address(
    cli, project, monkeypatch, text: str, variables: dict, found: list
):
    (project / "cloudtrain.toml").write_text(f"[notify]\n{text}\n")
    monkeypatch.delenv("HOOK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = cli("doctor", "--json").out
    assert [row["ok"] for row in json.loads(shown) if row["what"] == "notify"] == found
    assert "example.com" not in shown, "it may be a secret"


@pytest.mark.parametrize(
    ("parallelism", "shown"),
    [
        ({}, "2 nodes x 4 processes, 4 GPUs a node"),
        ({"strategy": "zero3"}, "2 nodes x 4 processes, 4 GPUs a node, zero3"),
        ({"tp_size": 2, "strategy": "fsdp"}, "2 nodes x 4 processes, 4 GPUs a node, fsdp, tp 2"),
    ],
)
def test_a_plan_names_how_the_model_is_split(cli, project, parallelism: dict, shown: str):
    (project / "train.py").write_text("# cloudtrain: fsdp tp_size\nimport accelerate, deepspeed")
    job = {
        "entrypoint": "train.py",
        "num_nodes": 2,
        "parallelism": parallelism,
        "resources": {"accelerators": "A100:4"},
    }
    (project / "job.yaml").write_text(yaml.safe_dump(job))
    (project / "cloudtrain.toml").write_text('[targets.uni]\nbackend = "slurm"\nfolder = "/s"\n')
    (world,) = (line for line in cli("plan", "job.yaml", "-t", "uni").out.splitlines() if line.startswith("  world"))
    assert world.split(None, 1)[1] == shown
