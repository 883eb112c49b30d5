"""SageMaker's and Vertex AI's variables on other backends: equal names and shapes, the run's own folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.runs.planning.plan import Planner
from tests.backends.sagemaker.test_toolkit_env import HYPERPARAMETERS
from tests.runs.test_entries import project, submit  # noqa: F401 - a fixture

RECORD = Path(__file__).parents[1] / "backends" / "sagemaker" / "toolkit_env.json"
SHOW = """
import json, os
named = {k: v for k, v in os.environ.items() if k.startswith(("SM_", "SAGEMAKER_", "TRAINING_", "AIP_"))}
print("SEEN", json.dumps([named, {k: v for k, v in os.environ.items() if k.startswith("CLOUDTRAIN_")}]))
"""


def seen(log: str) -> list[dict[str, str]]:
    lines = [line for line in log.splitlines() if "SEEN" in line]
    return json.loads(lines[0].partition("SEEN ")[2])


def kind(text: str) -> str:
    """Return the type of a variable's value, as a script would parse it."""
    try:
        return type(json.loads(text)).__name__
    except ValueError:
        return "text"


def notes(folder: Path, target: str | None = None, **changes: object) -> str:
    job = {"name": "x", "source": str(folder), "entrypoint": "train.py", **changes}
    return "\n".join(Planner(target).plan(job).notes)


@pytest.mark.usefixtures("census")
def test_names_and_shapes_are_sagemakers(project: Path, tmp_path: Path):  # noqa: F811
    (project / "train.py").write_text(SHOW)
    for name in ("train", "data"):
        (tmp_path / name).mkdir()
    job = {
        "entrypoint": "train.py",
        "sm_env": True,
        "aip_env": False,
        "hyperparameters": HYPERPARAMETERS,
        "inputs": {"train": f"{tmp_path}/train", "test-data": f"{tmp_path}/data"},
    }
    code, log, said = submit(project, job=json.dumps(job))
    assert code == 0, said
    made, ours = seen(log)
    record = json.loads(RECORD.read_text())["two hosts"]
    assert set(made) == set(record)  # SAGEMAKER_JOB_NAME and TRAINING_JOB_NAME are not among them
    assert {name: kind(text) for name, text in made.items()} == {name: kind(text) for name, text in record.items()}
    same = [name for name in record if name.startswith(("SM_HP", "SM_USER_", "SM_CHANNELS", "SM_MODULE_NAME"))]
    assert len(same) > 12 and {name: made[name] for name in same} == {name: record[name] for name in same}
    training, recorded = json.loads(made["SM_TRAINING_ENV"]), json.loads(record["SM_TRAINING_ENV"])
    assert training.keys() == recorded.keys() and training["job_name"] is None
    assert json.loads(made["SM_RESOURCE_CONFIG"]).keys() == json.loads(record["SM_RESOURCE_CONFIG"]).keys()
    assert made["SM_MODEL_DIR"] == ours["CLOUDTRAIN_MODEL_DIR"] and made["SM_CURRENT_INSTANCE_TYPE"] == "local"
    assert made["SM_OUTPUT_DATA_DIR"] == made["SM_OUTPUT_DIR"] == ours["CLOUDTRAIN_OUTPUT_DIR"]
    assert Path(made["SM_CHANNEL_TRAIN"]).resolve() == tmp_path / "train"
    assert made["SM_CHANNEL_TRAIN"].startswith(made["SM_INPUT_DIR"])


@pytest.mark.usefixtures("census")
def test_two_nodes_have_hosts_of_their_own(project: Path):  # noqa: F811
    (project / "train.py").write_text(
        "import json, os, socket\nhosts = json.loads(os.environ['SM_HOSTS'])\nsocket.gethostbyname(hosts[0])\n"
        "print('HOST', len(set(hosts)), hosts.index(os.environ['SM_CURRENT_HOST']), flush=True)\n"
    )
    code, log, said = submit(project, "train.py", "--num-nodes", "2")
    assert code == 0, said
    assert sorted(line.partition("HOST ")[2] for line in log.splitlines() if "HOST 2" in line) == ["2 0", "2 1"]


@pytest.mark.usefixtures("census")
def test_what_the_source_reads_is_set_and_nothing_else(project: Path):  # noqa: F811
    (project / "train.py").write_text(SHOW)
    code, log, _ = submit(project, "train.py", "--set", "aip_env=false", "--set", "sm_env=false")
    assert code == 0 and seen(log)[0] == {}
    (project / "train.py").write_text(SHOW.replace('"SM_", ', ""))
    code, log, _ = submit(project, "train.py")
    made, ours = seen(log)
    assert code == 0 and made == {
        "AIP_MODEL_DIR": ours["CLOUDTRAIN_MODEL_DIR"] + "/",
        "AIP_CHECKPOINT_DIR": ours["CLOUDTRAIN_CHECKPOINT_DIR"] + "/",
        "AIP_TENSORBOARD_LOG_DIR": ours["CLOUDTRAIN_OUTPUT_DIR"] + "/logs/",
    }


def test_the_plan_names_the_line(project: Path):  # noqa: F811
    (project / "train.py").write_text("import os\nprint(os.environ['SM_MODEL_DIR'])\n")
    assert "train.py:2 reads SM_MODEL_DIR: the SM_ variables are set" in notes(project)
    assert "SM_MODEL_DIR" not in notes(project, sm_env=False) and "reads" not in notes(project, "sagemaker-local")
    (project / "train.py").write_text("x = 'SM_80'\nos.getenv('AIP_MODEL_DIR')\n")
    assert "reads SM_" not in notes(project)
    assert "train.py:2 reads AIP_MODEL_DIR: the AIP_ variables are set" in notes(project)


def test_a_path_of_sagemaker_gives_a_note_elsewhere(project: Path):  # noqa: F811
    (project / "train.py").write_text("# /opt/ml/x\nd = os.environ.get('SM_MODEL_DIR', '/opt/ml/model')\n")
    assert "/opt/ml" not in notes(project)
    (project / "train.py").write_text("import os\nout = '/opt/ml/model'\n")
    assert "train.py:2 names a path below /opt/ml, which only SageMaker has" in notes(project)
    assert "/opt/ml" not in notes(project, "sagemaker-local")
