"""The patch of a dirty tree is kept with the run, and holds no credential, neither one that is there nor one that was."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cloudtrain.history.store import Store
from cloudtrain.runs.submit import Submitter
from cloudtrain.source import provenance

TOKEN = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z"  # noqa: S105 - of the right form, and nobody's
KEY_HEAD = "-----BEGIN RSA PRIVATE" + " KEY-----"
JOB = {"entrypoint": "train.py"}


def git(*words: str, cwd: Path) -> str:
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words],
        cwd=cwd,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A committed work tree, where one stands."""
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "data.txt").write_text("".join(f"line {n}\n" for n in range(50)))
    git("init", "-q", cwd=folder)
    git("add", ".", cwd=folder)
    git("commit", "-qm", "first", cwd=folder)
    monkeypatch.chdir(folder)
    return folder


def kept(folder: Path, job=JOB) -> dict:
    """Submit what lies in a folder, and return what was kept of its origin."""
    run = Submitter("local", watch=False).submit({**job, "source": str(folder)})
    try:
        return run.store.provenance(run.run_id)
    finally:
        run.cancel(60)


def everything_below(home: Path) -> bytes:
    return b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())


def test_a_patch_makes_the_submitted_tree_from_the_commit(tree, tmp_path, census):
    (tree / "train.py").write_text("print(2)\n")
    (tree / "data.txt").write_text("changed \xe9\n", "latin-1")
    origin = kept(tree)
    assert origin["commit"] == git("rev-parse", "HEAD", cwd=tree) and origin["dirty"] and origin["left_out"] == []
    git("clone", "-q", str(tree), str(tmp_path / "clone"), cwd=tmp_path)
    subprocess.run(
        ["git", "apply"], cwd=tmp_path / "clone", check=True, input=origin["text"].encode("utf-8", "surrogateescape")
    )
    for name in ("train.py", "data.txt"):
        assert (tmp_path / "clone" / name).read_bytes() == (tree / name).read_bytes()


def test_a_clean_tree_and_one_without_git_have_no_patch(tree, tmp_path, census):
    origin = kept(tree)
    assert (origin["text"], origin["dirty"]) == ("", False)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "train.py").write_text("print(1)\n")
    origin = kept(bare)
    assert (origin["text"], origin["commit"], origin["left_out"]) == ("", None, [])
    assert origin["client"]["host"] == os.uname().nodename


@pytest.mark.parametrize("where", ["added", "removed", "removed at the line's begin", "far from the change"])
def test_a_credential_never_lands(tree, home, where, census):
    name = tree / "config.txt"
    padding = "".join(f"padding {n}\n" for n in range(40))
    before, after = {
        "added": ("x\n", f"x\ntoken = {TOKEN}\n"),
        "removed": (f"token = {TOKEN}\n", "token = ...\n"),
        "removed at the line's begin": (f"{TOKEN}\n", "...\n"),
        "far from the change": (f"{KEY_HEAD}\n{padding}MIIEpAIBAAKCAQEA\n", f"{padding}MIIEpAIBAAKCAQEB\n"),
    }[where]
    name.write_text(before)
    git("add", ".", cwd=tree)
    git("commit", "-qm", "second", cwd=tree)
    name.write_text(after)
    (tree / "train.py").write_text("print(2)\n")
    patch = provenance.changes(tree, {"train.py", "config.txt"})
    assert "print(2)" in patch.text and "config.txt" not in patch.text
    (said,) = patch.left_out
    assert said.startswith("config.txt: it seems to contain a credential")
    if where != "added":  # else the guard refuses the tree as a whole
        assert kept(tree)["left_out"] == [said]
        stored = everything_below(home)
        assert TOKEN.encode() not in stored and b"MIIEpAIBAAKCAQEA" not in stored


def test_the_value_of_a_secret_and_files_that_are_not_packaged_stay_out(tree, home, monkeypatch, census):
    monkeypatch.setenv("MY_SECRET", "open sesame")
    (tree / ".cloudtrainignore").write_text("data.txt\n")
    (tree / "data.txt").write_text("a private note\n")
    (tree / "train.py").write_text("print('was: open sesame')\n")
    git("add", ".cloudtrainignore", cwd=tree)
    git("commit", "-qam", "second", cwd=tree)
    (tree / "train.py").write_text("print(3)\n")
    (tree / "data.txt").write_text("another private note\n")
    origin = kept(tree, {**JOB, "secrets": {"MY_SECRET": "env:MY_SECRET"}})
    assert origin["left_out"] == ["train.py: it contains the value of a secret"] and origin["text"] == ""
    assert b"private note" not in everything_below(home)


@pytest.mark.parametrize("text", ['key = """open\nsesame seeds\n"""', 'key = "b3BlbgpzZXNhbWUgc2VlZHMK//4="'])
def test_the_value_of_a_secret_of_several_lines_stays_out(tree, monkeypatch, text):
    monkeypatch.setenv("MY_SECRET", os.fsdecode(b"open\nsesame seeds\n\xff\xfe"))
    (tree / "train.py").write_text(f"{text}\n")
    origin = kept(tree, {**JOB, "secrets": {"MY_SECRET": "env:MY_SECRET"}})
    assert origin["left_out"] == ["train.py: it contains the value of a secret"] and origin["text"] == ""


def test_the_size_is_limited(tree, monkeypatch):
    monkeypatch.setattr(provenance, "MAX_BYTES", 400)
    (tree / "train.py").write_text("print(2)\n")
    (tree / "data.txt").write_text("y" * 1000)
    patch = provenance.changes(tree, {"train.py", "data.txt"})
    assert len(patch.text) <= 400 and "print(2)" in patch.text
    assert patch.left_out == ("data.txt: the patch would be longer than 0 KiB",)
    monkeypatch.setattr(provenance, "MAX_FILES", 1)
    assert "2 files are changed" in provenance.changes(tree, {"train.py", "data.txt"}).left_out[0]
    monkeypatch.setattr(provenance, "MAX_FILES", 9)
    monkeypatch.setattr(provenance, "_WHOLE", 100)
    assert "more than" in provenance.changes(tree, {"train.py", "data.txt"}).left_out[0]


@pytest.mark.parametrize(
    "setting", ["diff.noprefix=true", "diff.mnemonicPrefix=true", "color.ui=always", "diff.external=false"]
)
def test_what_the_user_has_configured_changes_nothing(tree, setting):
    (tree / "train.py").write_text("print(2)\n")
    plain = provenance.changes(tree, {"train.py"})
    git("config", *setting.split("="), cwd=tree)
    assert provenance.changes(tree, {"train.py"}) == plain and "a/train.py" in plain.text


def test_a_source_below_the_root_has_its_own_files_only(tree):
    (tree / "part").mkdir()
    (tree / "part" / "run.py").write_text("print(1)\n")
    git("add", ".", cwd=tree)
    git("commit", "-qm", "second", cwd=tree)
    (tree / "part" / "run.py").write_text("print(2)\n")
    (tree / "train.py").write_text("print(2)\n")
    patch = provenance.changes(tree / "part", {"run.py"})
    assert "a/run.py" in patch.text and "train.py" not in patch.text


def test_a_rerun_has_the_same_origin(tree, home, census):
    (tree / "train.py").write_text("print(2)\n")
    first = Submitter("local").submit({**JOB, "source": str(tree)})
    first.wait(120)
    (tree / "train.py").write_text("print(3)\n")
    second = first.rerun()
    second.wait(120)
    store = Store(home)
    one, other = store.provenance(first.run_id), store.provenance(second.run_id)
    assert one["text"] == other["text"] != "" and one["bundle"] == other["bundle"]


def test_untracked_files_are_made_by_the_patch(tree, tmp_path, census):
    new = {
        "model.py": b"print(2)\n", "no end.txt": b"one\ntwo", "empty": b"", 'dir/\u00e4 "b\\.txt': b"\n",
        "windows.txt": b"a\r\nb\r\n", "latin.txt": b"\xe9\x0c\n\n", "run.sh": b"#!/bin/sh\n",
    }  # fmt: skip
    (tree / "dir").mkdir()
    for name, content in new.items():
        (tree / name).write_bytes(content)
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("model.py")
    (tree / "staged.py").write_text("print(4)\n")
    git("add", "staged.py", cwd=tree)
    git("rm", "-q", "--cached", "data.txt", cwd=tree)  # forgotten by git, and packaged still
    (tree / "train.py").write_text("import model\n")
    origin = kept(tree)
    assert origin["left_out"] == []
    git("clone", "-q", str(tree), str(tmp_path / "clone"), cwd=tmp_path)
    clone = tmp_path / "clone"
    subprocess.run(["git", "apply"], cwd=clone, check=True, input=origin["text"].encode("utf-8", "surrogateescape"))
    for name in (*new, "train.py", "staged.py", "data.txt"):
        assert (clone / name).read_bytes() == (tree / name).read_bytes(), name
    assert os.readlink(clone / "link") == "model.py" and os.access(clone / "run.sh", os.X_OK)


def test_what_is_not_in_the_patch_is_said(tree, home, monkeypatch, census):
    (tree / "data.txt").unlink()
    (tree / "notes.txt").write_text("was: open sesame\n")
    (tree / "picture").write_bytes(b"\0" * 100)
    (tree / "token.txt").write_text(f"token = {TOKEN}\n")
    (tree / "big.txt").write_text("x" * 5000)
    monkeypatch.setattr(provenance, "MAX_BYTES", 4096)
    packaged = {"train.py", "notes.txt", "picture", "token.txt", "big.txt"}
    patch = provenance.changes(tree, packaged, ["open sesame"])
    assert patch.text == "" and list(patch.left_out) == [
        "data.txt: the removal of this file",
        "big.txt: git does not track it, and the patch would be longer than 4 KiB",
        "notes.txt: git does not track it, and it contains the value of a secret",
        "picture: git does not track it, and it is not text",
        "token.txt: git does not track it, and it seems to contain a credential (Hugging Face token)",
    ]
    monkeypatch.setattr(provenance, "MAX_NAMED", 1)
    monkeypatch.setattr(provenance, "MAX_FILES", 2)
    assert provenance.changes(tree, packaged, ["open sesame"]).left_out[1:] == (
        patch.left_out[1], "and 3 more untracked files"
    )  # fmt: skip


def test_a_submodule_that_has_changed_is_named(tree, tmp_path):
    git("clone", "-q", str(tree), str(tmp_path / "library"), cwd=tmp_path)
    git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "library"), "lib", cwd=tree)
    git("commit", "-qm", "second", cwd=tree)
    (tree / "lib" / "train.py").write_text("print(2)\n")
    patch = provenance.changes(tree, {"train.py", "data.txt", ".gitmodules", "lib/train.py", "lib/data.txt"})
    assert (patch.text, patch.left_out) == ("", ("lib: changes in a submodule",))
