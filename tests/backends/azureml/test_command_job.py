"""The YAML of a command job becomes a job whose request is the one that azure-ai-ml renders of it; the rest is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.azureml import request
from cloudtrain.backends.azureml.command_job import convert, convert_file
from cloudtrain.backends.azureml.options import AzuremlOptions
from cloudtrain.cli import main
from cloudtrain.errors import BadJob, BadRequest
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle
from tests.backends.azureml.shapes import OPTIONS, WORKSPACE

JOBS = Path(__file__).parent / "jobs"
FILES = sorted(JOBS.glob("*.yml"))
# what azure-ai-ml leaves to the workspace, or cloudtrain does itself: the launcher starts the ranks of a node
OURS = {"command", "environmentVariables", "inputs", "outputs", "environmentId", "codeId", "description", "services"}
ENDS_S = 30 + request.SETUP_S  # our limit of the job is later by these


def sent(path: Path, folder: Path) -> dict[str, Any]:
    """Return the properties of the request for a command job's file."""
    found = convert_file(path)
    assert found is not None
    job, _ = found
    source = folder / "source"
    source.mkdir()
    (source / (name if (name := str(job.get("entrypoint"))).endswith(".py") else "any.py")).write_text("")
    (source / "words").mkdir()
    (source / "words" / "train.py").write_text("")
    inputs = {name: "az://table@store" if item == "azureml:table@latest" else item
              for name, item in job.get("inputs", {}).items()}  # fmt: skip
    own = job.pop("options", {}).get("azureml", {})
    whole = Job.from_dict({"name": "a", **job, "source": str(source), "inputs": inputs})
    options = AzuremlOptions(**{**OPTIONS, **own}).model_dump()
    plan = request.build(whole, Bundle.make(source, folder / "bundles"), "run", 1, options)
    return dict(json.loads(json.dumps(plan.request["job"]["properties"])))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_request_is_that_of_the_sdk(path: Path, tmp_path: Path) -> None:
    ours, theirs = sent(path, tmp_path), json.loads(path.with_suffix(".json").read_text())["properties"]
    limit = theirs.get("limits", {}).get("timeout", "P1D")
    assert ours["limits"].pop("timeout") == request.iso(seconds_of(limit) + ENDS_S)
    (theirs.get("limits") or {}).pop("timeout", None)
    ranks = (theirs.get("distribution") or {}).get("processCountPerInstance")
    assert ranks is None or ours["distribution"] == {"distributionType": "PyTorch", "processCountPerInstance": 1}
    for own in (ours, theirs):
        own["tags"] = {
            key: value for key, value in (own.get("tags") or {}).items() if not key.startswith("cloudtrain_")
        }
        for name in [*OURS, "distribution", "displayName"]:
            own.pop(name, None)
    assert theirs["resources"].pop("properties") in ({}, {"priority_class": "x"})
    assert ours["resources"].pop("properties") == {}
    theirs.setdefault("limits", {"jobLimitsType": "Command"})
    theirs["resources"].setdefault("instanceCount", 1)
    if "computeId" in theirs:  # the SDK resolves the name when it sends the job
        theirs["computeId"] = f"{WORKSPACE}/computes/{theirs['computeId']}"
    assert ours == theirs


def seconds_of(duration: str) -> int:
    found = re.fullmatch(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?", duration)
    assert found
    return sum(int(text or 0) * unit for text, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True))


def test_ranks_start_as_there() -> None:
    job, notes = convert_file(JOBS / "ranks.yml") or ({}, [])
    assert (job["entrypoint"], job["num_nodes"], job["processes_per_node"]) == ("fit.py", 2, 8)
    assert job["args"] == ["--images", "{input:images}", "--rate", "0.002", "--augment", "True",
                           "--save-to", "{model_dir}", "--tables", "{output_dir}/tables"]  # fmt: skip
    assert job["setup"].splitlines() == ['mkdir -p "$CLOUDTRAIN_OUTPUT_DIR/tables"', "pip install -r requirements.txt"]
    assert job["inputs"] == {"images": "az://pictures@visionstore/train"} and job["env"]["WORKERS"] == "4"
    assert [note.partition(":")[0] for note in notes] == ["outputs.model", "outputs.tables", "description", "target"]


def test_the_call_of_a_script_is_the_job_of_its_yaml(tmp_path: Path, home: Path) -> None:
    """jobs/ranks.py; with_the_sdk.py checks that azure-ai-ml renders both alike."""
    assert convert_file(JOBS / "ranks.py") == convert_file(JOBS / "ranks.yml")
    cell = {"cell_type": "code", "source": ["%pip install x\n", (JOBS / "ranks.py").read_text()]}
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert main(["init", "--from", str(tmp_path / "book.ipynb"), "-o", str(tmp_path / "job.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["processes_per_node"] == 8


CALL = "from azure.ai.ml import command\nimport os\nrate = 0.1\njob = command(code='.', command='python a.py', {})\n"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (CALL.format("timeout=60") + "job.set_resources(instance_count=3)\n", "num_nodes", 3),
        (CALL.format("timeout=60, environment_variables={'RATE': rate}"), "env", {"RATE": "0.1"}),
        (
            CALL.format("timeout=60, display_name=os.environ['N']"),
            "",
            "display_name: write this value yourself, because",
        ),
        (CALL.format("timeout=60, **more"), "", "**: write this value yourself, because the script computes it: more"),
        (
            "import azure.ai.ml as m\njob = m.command(code='.', command=f'{x}')\n",
            "run",
            "exit 1  # write the command here\n",
        ),
    ],
)
def test_what_a_script_computes_is_said(tmp_path: Path, text: str, key: str, value: Any) -> None:
    (tmp_path / "a.py").write_text(text)
    job, notes = convert_file(tmp_path / "a.py") or ({}, [])
    assert job[key] == value if key else notes[0].startswith(value)


def test_other_scripts_and_several_calls(tmp_path: Path, home: Path) -> None:
    script = tmp_path / "a.py"
    for text in ("command(command='x')\n", "import azure.ai.ml\ncommand(1)\n"):
        script.write_text(text)
        assert convert_file(script) is None
    for text, words in ((CALL.format("timeout=60") * 2, "several calls of command.*in lines 4, 8"),
                        ("import azure.ai.ml\nif", "not valid Python in line 2")):  # fmt: skip
        script.write_text(text)
        with pytest.raises(BadRequest, match=words):
            convert_file(script)


def test_a_datastore_stays_one() -> None:
    place = "azureml://datastores/a/paths/b"
    for mode, item in (
        (None, {"uri": place, "mode": "mount"}),
        ("download", place),
        ("direct", {"uri": place, "mode": "stream"}),
    ):
        job, notes = convert({**BASE, "inputs": {"d": {"path": place, **({"mode": mode} if mode else {})}}})
        assert job["inputs"] == {"d": item} and [note for note in notes if "inputs" in note] == []


def test_several_commands_are_a_text() -> None:
    job, notes = convert_file(JOBS / "cluster.yml") or ({}, [])
    assert job["run"].splitlines() == [
        "set +e", 'mkdir -p "$CLOUDTRAIN_OUTPUT_DIR/report"', "ls ${CLOUDTRAIN_INPUT_TABLE}",
        "python report.py --table ${CLOUDTRAIN_INPUT_TABLE}/a.csv --rounds 12  > ${CLOUDTRAIN_OUTPUT_DIR}/report/out.txt",
    ]  # fmt: skip
    said = {note.partition(":")[0] for note in notes}
    assert said == {"display_name", "limits.timeout", "inputs.table", "inputs", "outputs.report", "command",
                    "services.notebook", "resources.properties", "target"}  # fmt: skip


BASE = {"command": "python a.py", "code": ".", "limits": {"timeout": 60}}


@pytest.mark.parametrize(
    "change,key,value",
    [
        ({"command": "python a.py --x $HOME"}, "run", "python a.py --x $HOME\n"),
        ({"command": "cd a && python a.py"}, "run", "cd a && python a.py\n"),
        ({"command": "python ../a.py"}, "run", "python ../a.py\n"),
        ({"command": "python 'a b.py' \"c d\""}, "entrypoint", "a b.py"),
        ({"command": "python a.py \\\n  --x 1"}, "args", ["--x", "1"]),
        ({"compute": "azureml:gpus"}, "options", {"azureml": {"compute": "gpus"}}),
        ({"distribution": {"type": "tensorflow", "worker_count": 3}}, "num_nodes", 3),
        ({"distribution": {"type": "tensorflow", "worker_count": 3}}, "distributed_env", "tensorflow"),
        ({"distribution": {"type": "ray"}}, "ray", True),
        ({"environment_variables": {"D": "${{inputs.d}}"}, "inputs": {"d": {"path": "wasbs://c@account.blob.core.windows.net"}}},
         "env", {"D": "{input:d}"}),
        ({"inputs": {"d": {"path": "abfss://c@account.dfs.core.windows.net/x", "mode": "direct"}}},
         "inputs", {"d": {"uri": "az://c@account/x", "mode": "stream"}}),
        ({"queue_settings": {"job_tier": "Spot"}}, "resources", {"use_spot": True}),
    ],
)  # fmt: skip
def test_each_key_has_its_place(change: dict[str, Any], key: str, value: Any) -> None:
    assert convert({**BASE, **change})[0][key] == value


@pytest.mark.parametrize(
    "change,note",
    [
        ({"code": None}, "code: is missing there"),
        ({"code": "azureml:code:1"}, "code: write the folder or git+https"),
        ({"compute": "local"}, "compute: runs on this machine"),
        ({"resources": {"shm_size": "512m"}}, "resources.shm_size: has no counterpart in a job file: 512m"),
        ({"resources": {"docker_args": "--ipc=host"}}, "resources.docker_args: is not sent: --ipc=host"),
        ({"queue_settings": {"job_tier": "premium"}}, "queue_settings.job_tier: has no counterpart"),
        ({"queue_settings": {"priority": "high"}, "compute": "gpus"}, "queue_settings.priority: has no counterpart"),
        ({"environment": {"build": {"path": "docker"}}}, "environment.build: build the image yourself"),
        ({"command": "torchrun a.py", "distribution": {"type": "pytorch"}}, "distribution: the command runs once on each"),
        ({"command": "python a.py ${{inputs.x}}"}, "inputs.x: has no value"),
        ({"command": "echo '${{inputs.x}}'", "inputs": {"x": {"path": "y"}}}, "command: between '"),
        ({"command": "python a.py $[[--only [a] ${{inputs.x}}]]"}, "command: $[[...]] with a [ in it stays"),
        ({"command": "python a.py $AZUREML_RUN_ID"}, "command: on this platform only"),
        ({"inputs": {"x": {"path": "y", "type": "mltable"}}}, "inputs.x.type: mltable"),
        ({"distribution": {"type": "tensorflow", "parameter_server_count": 1}}, "distribution.parameter_server_count: there"),
        ({"identity": {"type": "managed", "object_id": "x"}}, "identity.object_id: has no counterpart in a job file: x"),
        ({"some_new_key": {"a": 1}}, "some_new_key.a: has no counterpart in a job file: 1"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_said(change: dict[str, Any], note: str) -> None:
    assert [each for each in convert({**BASE, **change})[1] if each.startswith(note)]
    assert len(convert(BASE)[1]) == 1


@pytest.mark.parametrize(
    "place", ["", "resources", "distribution", "queue_settings", "limits", "identity", "environment", "inputs.images",
              "outputs.model", "services", "notification_settings"],
)  # fmt: skip
def test_no_key_is_dropped_silently(place: str) -> None:
    given = yaml.safe_load((JOBS / "ranks.yml").read_text())
    section = given
    for name in filter(None, place.split(".")):
        section = section.setdefault(name, {})
    section["odd"] = "zz7"
    assert [note for note in convert(given)[1] if note.startswith(place) and "odd" in note and "zz7" in note]
    for name in ("inputs", "outputs", "tags", "environment_variables"):
        assert any(note.startswith(f"{name}: ") and "zz7" in note for note in convert({**BASE, name: ["zz7"]})[1])
    assert any("fork" in note for note in convert({**BASE, "distribution": {"type": "fork"}})[1])


def test_init_writes_it_and_other_files_are_refused(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "job.yaml"
    assert main(["init", "--from", str(JOBS / "ranks.yml"), "-o", str(output)]) == 0
    written = yaml.safe_load(output.read_text())
    assert written["target"] == "azureml" and written["entrypoint"] == "fit.py"
    assert "# outputs.tables: is outputs/tables of the run: not used: mode rw_mount, path azureml" in output.read_text()
    assert "[targets.azureml] of cloudtrain.toml" in output.read_text()
    capsys.readouterr()
    assert main(["init", "--from", str(output), "-o", str(tmp_path / "other.yaml")]) == 2
    assert "is a job file already" in capsys.readouterr().err
    assert main(["plan", str(JOBS / "ranks.yml")]) == 2
    assert "this is a file of commandJob.schema.json" in capsys.readouterr().err


def test_a_file_of_another_kind_is_no_command_job(tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    schema = "$schema: https://azuremlschemas.azureedge.net/latest/{}.schema.json\n"
    for text, error, words in [(schema.format("pipelineJob"), BadRequest, "is a pipelineJob; only a command job can"),
                               (schema.format("commandJob"), BadRequest, "is a commandJob without a command; only"),
                               (schema.format("commandJob") + "command: a\ncommand: b\n", BadJob, "command")]:  # fmt: skip
        path.write_text(text)
        with pytest.raises(error, match=words):
            convert_file(path)
    for text in ("a: 1\n", "- a\n", "type: task\ncommands: [a]\n"):
        path.write_text(text)
        assert convert_file(path) is None
    assert convert_file(tmp_path / "x.sh") is None
    (tmp_path / "x.py").touch()
    assert convert_file(tmp_path / "x.py") is None
