"""cloudtrain.toml: found, read, and told what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.errors import BadJob, BadRequest
from cloudtrain.job import configfile
from cloudtrain.job.targets import config_files


@pytest.fixture
def user(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "user config"
    folder.mkdir()
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(folder))
    return folder / "cloudtrain.toml"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_nearest_file_of_the_project_counts(tmp_path, user):
    start = tmp_path / "a" / "b" / "c"
    start.mkdir(parents=True)
    assert config_files(start) == []
    outer = written(tmp_path / "cloudtrain.toml", "")
    assert config_files(start) == [outer]
    inner = written(tmp_path / "a" / "b" / "cloudtrain.toml", "")
    assert config_files(start) == [inner]
    user.write_text("")
    assert config_files(start) == [user, inner]
    assert config_files(user.parent) == [user]  # once, where they are the same


def test_the_users_folder_is_the_platforms(tmp_path, monkeypatch):
    import platformdirs

    monkeypatch.delenv("CLOUDTRAIN_CONFIG_HOME", raising=False)
    monkeypatch.setattr(platformdirs, "user_config_path", lambda name: tmp_path / "platform" / name)
    own = written(tmp_path / "platform" / "cloudtrain" / "cloudtrain.toml", "")
    assert config_files(tmp_path) == [own]


def test_values_have_their_lines_and_texts(tmp_path):
    path = written(
        tmp_path / "cloudtrain.toml",
        '# mine\n[defaults]\nnum_nodes = 2\nresources.disk_gb = 5\n\n[defaults.hyperparameters]\nlr = 1.10\n"a.b" = 3.0e-4\n'
        'day = 2026-11-20\n[targets.prod]\nbackend = "ssh"\nhosts = [\n  {address = "a"},\n]\n',
    )
    document = configfile.read(path)
    assert document.value["defaults"] == {
        "num_nodes": 2,
        "resources": {"disk_gb": 5},
        "hyperparameters": {"lr": 1.1, "a.b": 3e-4, "day": "2026-11-20"},
    }
    where = {
        ("defaults", "num_nodes"): 3,
        ("defaults", "resources", "disk_gb"): 4,
        ("defaults", "hyperparameters", "lr"): 7,
        ("defaults", "hyperparameters", "a.b"): 8,
        ("targets", "prod"): 10,
        ("targets", "prod", "hosts", 0, "address"): 12,
    }
    assert {key: document.mark(key).line for key in where} == where
    assert document.mark(("defaults", "hyperparameters", "lr")).text == "1.10"
    assert document.mark(("defaults", "hyperparameters", "a.b")).text == "3.0e-4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = ", "is not valid TOML: invalid value (at line 1, the end of the file)"),
        ("[defaults]\nname = prod", "is not valid TOML: invalid value (at line 2, column 8)"),
        ("[defaults\n", "line 1"),
        ("[a]\n[a]", "line 2"),
        ("a = 1\na = 2", "line 2"),
    ],
)
def test_what_is_no_toml_says_so_in_one_sentence(text, said, tmp_path):
    path = written(tmp_path / "cloudtrain.toml", text)
    with pytest.raises(BadRequest) as caught:
        configfile.read(path)
    assert str(caught.value).startswith(f"{path} is not valid TOML: ") and said in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.hint


def test_what_is_no_text(tmp_path):
    path = tmp_path / "cloudtrain.toml"
    path.write_bytes(b"\xff\xfe\0")
    with pytest.raises(BadRequest, match="is not UTF-8 text"):
        configfile.read(path)
    with pytest.raises(BadRequest, match="cannot be read"):
        configfile.read(tmp_path)


def test_every_wrong_table_is_told(tmp_path):
    path = written(
        tmp_path / "cloudtrain.toml",
        'x = 1\n[default]\n[targets]\na = "ssh"\n[targets.b]\nbackend = 5\n',
    )
    with pytest.raises(BadJob) as caught:
        configfile.read(path)
    assert [(p.path, p.line) for p in caught.value.problems] == [
        ("x", 1), ("default", 2), ("targets.a", 4), ("targets.b.backend", 6),
    ]  # fmt: skip
    path.write_text('defaults = "x"\ntargets = 1')
    with pytest.raises(BadJob, match="must be a table"):
        configfile.read(path)


def test_targets_of_two_files_are_merged_key_by_key(tmp_path):
    weak = configfile.read(
        written(tmp_path / "u" / "cloudtrain.toml", '[targets.a]\nbackend = "ssh"\nuser = "u"\nport = 1\n')
    )
    strong = configfile.read(
        written(tmp_path / "p" / "cloudtrain.toml", '[targets.a]\nport = 2\n[targets.b]\nbackend = "slurm"\n')
    )
    found = configfile.targets([weak, strong])
    assert {name: target.backend for name, target in found.items()} == {"a": "ssh", "b": "slurm"}
    assert found["a"].options.value == {"user": "u", "port": 2}
    assert Path(found["a"].options.mark(("port",)).file).parent.name == "p"
    assert Path(found["a"].options.mark(("user",)).file).parent.name == "u"
    assert found["b"].options.value == {}


def test_a_target_names_its_backend(tmp_path):
    document = configfile.read(written(tmp_path / "cloudtrain.toml", '[targets.a]\n\n[targets.b]\nuser = "x"\n'))
    with pytest.raises(BadJob) as caught:
        configfile.targets([document])
    assert [(p.path, p.message, p.line) for p in caught.value.problems] == [
        ("targets.a", "has no backend", 1), ("targets.b", "has no backend", 3),
    ]  # fmt: skip


def test_default_paths_stand_below_the_files_folder(tmp_path):
    path = written(
        tmp_path / "cloudtrain.toml",
        '[defaults]\noutput = "out"\n[defaults.inputs]\na = "d"\nb = {uri = "e", mode = "copy"}\nc = "s3://x/y"\nd = "/abs"\n',
    )
    defaults = configfile.read(path).value["defaults"]
    assert defaults["output"] == f"{tmp_path}/out"
    assert defaults["inputs"] == {
        "a": f"{tmp_path}/d",
        "b": {"uri": f"{tmp_path}/e", "mode": "copy"},
        "c": "s3://x/y",
        "d": "/abs",
    }
