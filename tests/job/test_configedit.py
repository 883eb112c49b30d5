"""One key of a target is changed in cloudtrain.toml, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.errors import BadRequest
from cloudtrain.job import configedit

NEW = "registry/name@sha256:1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('[targets.a]\nimage = "x" # why\nbackend = "b"\n', f'[targets.a]\nimage = "{NEW}" # why\nbackend = "b"\n'),
        ('[targets.a]\nbackend = "b"', f'[targets.a]\nbackend = "b"\nimage = "{NEW}"\n'),
        (
            '[targets.a]\nbackend = "b"\n\n# other\n[targets.b]\nimage = "y"\n',
            f'[targets.a]\nbackend = "b"\nimage = "{NEW}"\n\n# other\n[targets.b]\nimage = "y"\n',
        ),
        (
            '[targets."a"]\r\nbackend = "b"\r\n[targets.a.labels]\r\nimage = "z"\r\n',
            f'[targets."a"]\r\nbackend = "b"\r\nimage = "{NEW}"\r\n[targets.a.labels]\r\nimage = "z"\r\n',
        ),
    ],
)
def test_the_rest_stays(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "cloudtrain.toml"
    path.write_bytes(before.encode())
    path.chmod(0o644)
    configedit.check_key(path, "a", "image")
    assert path.read_bytes() == before.encode()
    configedit.set_key(path, "a", "image", NEW)
    assert path.read_bytes() == after.encode() and path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "text",
    [
        '[targets]\na = {backend = "b"}\n',
        'targets.a.backend = "b"\n',
        '[targets.a]\nbackend = "b"\nimage = """\nx"""\n',
        '[notify]\ncommand = """\n[targets.a]\nbackend = 1\n"""\n[targets]\na = {backend = "b"}\n',
    ],
)
def test_what_is_no_plain_table_is_refused_and_stays(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cloudtrain.toml"
    path.write_text(text)
    for act in (lambda: configedit.check_key(path, "a", "image"), lambda: configedit.set_key(path, "a", "image", NEW)):
        with pytest.raises(BadRequest, match="is not a plain table"):
            act()
    assert path.read_text() == text


def test_the_file_that_wins_is_changed_and_a_link_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(tmp_path / "user"))
    text = '[targets.{}]\nbackend = "b"\n'
    for folder, names in (("user", "ab"), ("project", "bc")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "real.toml").write_text("".join(text.format(name) for name in names))
        (tmp_path / folder / "cloudtrain.toml").symlink_to("real.toml")
    start = tmp_path / "project"
    assert [configedit.find_file(name, start).parent.name for name in "abc"] == ["user", "project", "project"]
    configedit.set_key(start / "cloudtrain.toml", "c", "image", NEW)
    assert (start / "cloudtrain.toml").is_symlink() and NEW in (start / "real.toml").read_text()
    with pytest.raises(BadRequest, match="target d is not in cloudtrain.toml"):
        configedit.find_file("d", start)
