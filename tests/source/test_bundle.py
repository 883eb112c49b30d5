"""Bundles: the same tree is the same digest, stored once, unpacked whole or not at all."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

import pytest

from cloudtrain.errors import BadSource, StoreError
from cloudtrain.source import archive, bundle, node_code
from cloudtrain.source.bundle import Bundle, runtime_files
from tests.source.trees import git, repository, write

ROOT = Path(__file__).parents[2]
FILES = {"train.py": "print('hi')\n", "pkg/__init__.py": "", "data/späße.txt": "x" * 3000, "run.sh": "#!/bin/sh\n"}


@pytest.fixture
def source(tmp_path) -> Path:
    root = repository(tmp_path / "source", FILES)
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("data")
    return root


@pytest.fixture
def into(tmp_path) -> Path:
    return tmp_path / "home" / "bundles"


def content(root: Path) -> dict[str, object]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes(), path.stat().st_mode & 0o777
    return found


def python(code: str, *arguments: Path, **env: str) -> str:
    """Run a program in a new process, and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if ".tmp" in path.name]


def refusal(source, into, **options) -> str:
    with pytest.raises(BadSource) as caught:
        Bundle.make(source, into, **options)
    return str(caught.value)


# -- what is in it ----------------------------------------------------------------------------------------------------


def test_a_bundle_holds_the_source_and_what_runs_it(source, into):
    made = Bundle.make(source, into)
    assert made.path == into / f"{made.sha256}.tar.gz"
    assert made.size_bytes == made.path.stat().st_size
    assert hashlib.sha256(gzip.decompress(made.path.read_bytes())).hexdigest() == made.sha256
    assert [file.path for file in made.files] == ["data/späße.txt", "link", "pkg/__init__.py", "run.sh", "train.py"]
    with tarfile.open(made.path) as tar:
        members = tar.getnames()
    assert members == sorted(members, key=str.encode)
    assert {name for name in members if not name.startswith(".cloudtrain/")} == {file.path for file in made.files}
    ours = {path for path, _ in runtime_files(in_memory=False)}
    assert {name for name in members if name.startswith(".cloudtrain/")} == ours


def test_files_for_a_model_in_memory_travel_with_it_alone(source, into):
    def runtime() -> set[str]:
        with tarfile.open(Bundle.make(source, into).path) as tar:
            return {name for name in tar.getnames() if name.startswith(".cloudtrain/")}

    usual = runtime()
    write(source, {"shipped/parts.pkl": ""})
    assert runtime() - usual == {
        ".cloudtrain/shipped.py",
        *(f".cloudtrain/trainer/{name}.py" for name in ("pickled", "in_memory_arguments", "in_memory_model")),
        *(f".cloudtrain/trainer/{name}.py" for name in ("data/mapped", "pickles/__init__", "pickles/mapped")),
    }


def test_runtime_files_are_the_entrypoints_without_tests_and_one_file_twice():
    found = dict(runtime_files())
    there = {path.relative_to(ROOT / "entrypoints") for path in (ROOT / "entrypoints").rglob("*.py")}
    wanted = {f".cloudtrain/{path}" for path in there if not {"tests", "__pycache__"} & set(path.parts)}
    wanted -= {f".cloudtrain/trainer/{name}.py" for name in ("preview", "pickles/array_file", "pickles/pickler")}
    fence = ".cloudtrain/path/cloudtrain_fence.py"
    assert found.keys() == wanted | {fence} and found[fence] == found[".cloudtrain/launcher/fence.py"]
    assert ".cloudtrain/launch.py" in found


def test_the_shared_trainer_stays_here_where_no_job_needs_it(source, into):
    def runtime(**arguments) -> tuple[set[str], Bundle]:
        made = Bundle.make(source, into, **arguments)
        with tarfile.open(made.path) as tar:
            return {name for name in tar.getnames() if name.startswith(".cloudtrain/")}, made

    lean, without = runtime(trainer=False)
    whole, with_trainer = runtime()
    programs = {
        ".cloudtrain/train.py",
        ".cloudtrain/evaluate_model.py",
    }
    assert whole - lean == programs | {name for name in whole if name.startswith(".cloudtrain/trainer/")}
    assert len(whole - lean) > 60 and ".cloudtrain/launch.py" in lean and ".cloudtrain/path/cloudtrain_media.py" in lean
    assert without.source_sha256 == with_trainer.source_sha256
    assert with_trainer.size_bytes - without.size_bytes > 150_000, (
        "bytes of the trainer, whatever size the launcher has"
    )
    assert runtime(trainer=False)[1] == without
    (source / "go.sh").write_text("torchrun .cloudtrain/train.py --model m\n")
    assert runtime(trainer=False)[0] == whole, "a script of the source starts it"


def test_runtime_files_of_a_wheel_and_of_a_checkout(tmp_path, monkeypatch):
    files = {"launch.py": "", "node/a.py": "", "tests/test_a.py": "", "node/__pycache__/b.py": "", "node/notes.txt": ""}
    wanted = {".cloudtrain/launch.py", ".cloudtrain/node/a.py"}
    monkeypatch.setattr(node_code, "__file__", str(tmp_path / "lib/cloudtrain/source/bundle.py"))
    write(tmp_path / "lib", {f"entrypoints/{name}": text for name, text in files.items()})
    assert dict(runtime_files()).keys() == wanted
    write(tmp_path / "lib", {f"cloudtrain/_entrypoints/{name}": text for name, text in files.items()})
    assert {path: file.parts[-2] for path, file in runtime_files()}[".cloudtrain/launch.py"] == "_entrypoints"
    assert dict(runtime_files()).keys() == wanted


def test_what_a_plan_says(source, into):
    head = git(source, "rev-parse", "HEAD").strip()
    made = Bundle.make(source, into)
    assert made.to_dict() == {"sha256": made.sha256, "source_sha256": made.source_sha256, "size_bytes": made.size_bytes,
                              "files": 5, "commit": head, "dirty": True}  # fmt: skip
    json.dumps(made.to_dict())
    assert made.source == str(source)


# -- the same tree is the same digest ---------------------------------------------------------------------------------


def test_time_umask_order_owner_and_place_do_not_matter(source, into, tmp_path):
    first = Bundle.make(source, into)
    other = tmp_path / "quite" / "another place"
    before = os.umask(0o077)
    try:
        other.mkdir(parents=True)
        for name in reversed([file.path for file in first.files]):
            (other / name).parent.mkdir(exist_ok=True)
            if (source / name).is_symlink():
                (other / name).symlink_to(os.readlink(source / name))
            else:
                (other / name).write_bytes((source / name).read_bytes())
                (other / name).chmod(0o700 if name == "run.sh" else 0o604)
                os.utime(other / name, (1, 1))
    finally:
        os.umask(before)
    second = Bundle.make(other, tmp_path / "elsewhere")
    assert (second.sha256, second.source_sha256, second.files) == (first.sha256, first.source_sha256, first.files)
    assert (second.commit, second.dirty) == (None, False)


def test_another_process_with_another_hash_seed_and_locale_agrees(source, into):
    code = """
import sys
from pathlib import Path
from cloudtrain.source.bundle import Bundle
print(Bundle.make(*map(Path, sys.argv[1:])).sha256)
"""
    printed = python(code, source, into / "x", PYTHONHASHSEED="99", LC_ALL="C", TZ="Asia/Tokyo")
    assert printed.strip() == Bundle.make(source, into).sha256


@pytest.mark.parametrize("change", ["content", "name", "mode", "link", "more", "less", "moved boundary"])
def test_any_change_is_another_digest(source, into, change):
    first = Bundle.make(source, into)
    if change == "content":
        write(source, {"train.py": "print('ho')\n"})
    elif change == "name":
        (source / "train.py").rename(source / "train2.py")
    elif change == "mode":
        (source / "train.py").chmod(0o755)
    elif change == "link":
        (source / "link").unlink()
        (source / "link").symlink_to("pkg")
    elif change == "more":
        write(source, {"new": ""})
    elif change == "less":
        (source / "run.sh").unlink()
    else:
        write(source, {"pkg/__init__.py": "p", "run.sh": "#!/bin/sh\n"[1:]})
        (source / "run.sh").chmod(0o755)
    second = Bundle.make(source, into)
    assert second.sha256 != first.sha256 and second.source_sha256 != first.source_sha256


def test_files_of_ours_count_in_the_digest_but_not_in_that_of_the_source(source, into, tmp_path, monkeypatch):
    first = Bundle.make(source, into)
    ours = write(tmp_path / "ours", {"launch.py": "# another version\n"})
    monkeypatch.setattr(bundle, "runtime_files", lambda *_: [(".cloudtrain/launch.py", ours / "launch.py")])
    second = Bundle.make(source, into)
    assert second.sha256 != first.sha256 and second.source_sha256 == first.source_sha256


# -- the folder of bundles --------------------------------------------------------------------------------------------


def test_unchanged_source_is_not_packed_again(source, into):
    first = Bundle.make(source, into)
    first.path.write_bytes(b"x" * first.size_bytes)  # would be replaced by packing
    assert Bundle.make(source, into) == first
    assert first.path.read_bytes() == b"x" * first.size_bytes


def test_an_archive_that_is_not_whole_is_made_again(source, into):
    first = Bundle.make(source, into)
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[:-20])
    assert Bundle.stored(into, first.sha256) is None
    assert Bundle.make(source, into) == first
    assert first.path.read_bytes() == whole


def test_a_stored_bundle_is_found_by_its_digest_alone(source, into):
    made = Bundle.make(source, into)
    shutil.rmtree(source)
    assert Bundle.stored(into, made.sha256) == made


def test_a_stored_bundle_knows_the_commit_of_the_last_packaging(source, into):
    made = Bundle.make(source, into)
    git(source, "add", "-A")
    git(source, "commit", "-qm", "all of it")
    again = Bundle.make(source, into)
    assert (again.sha256, again.dirty) == (made.sha256, False)
    assert Bundle.stored(into, made.sha256) == again != made


def test_what_is_no_stored_bundle(source, into):
    made = Bundle.make(source, into)
    for text in ("", "..", "0" * 64, made.sha256.upper(), f"../bundles/{made.sha256}", made.sha256 + "\n"):
        assert Bundle.stored(into, text) is None
    sidecar = into / f"{made.sha256}.json"
    text = sidecar.read_text()
    for damage in ("", "[]", "{}", "null", '{"files": 1}', text[:-5], text.replace('"dirty"', '"unknown"')):
        sidecar.write_text(damage)
        assert Bundle.stored(into, made.sha256) is None
    assert Bundle.make(source, into) == made
    made.path.unlink()
    assert Bundle.stored(into, made.sha256) is None


def test_many_at_once_make_one_whole_bundle(source, into):
    write(source, {f"f{number}": os.urandom(50_000) for number in range(20)})
    found: list[Bundle] = []
    threads = [threading.Thread(target=lambda: found.append(Bundle.make(source, into))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1
    there = [".cache", f"{found[0].sha256}.json", f"{found[0].sha256}.tar.gz"]
    assert sorted(path.name for path in into.iterdir()) == sorted(there)
    assert leftovers(into) == []
    found[0].extract(into.parent / "x")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(source, into):
    write(source, {"big": os.urandom(400_000)})
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    code = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {hard}))
from pathlib import Path
from cloudtrain.source.bundle import Bundle
from cloudtrain.errors import StoreError
try:
    Bundle.make(Path({str(source)!r}), Path({str(into)!r}))
except StoreError as error:
    print(error, "|", error.hint)
"""
    assert python(code).startswith(f"{into} cannot be written: {os.strerror(errno.EFBIG)} | make room")
    assert list(into.iterdir()) == []


def test_a_folder_that_cannot_be_made(source, tmp_path):
    write(tmp_path, {"file": ""})
    with pytest.raises(StoreError, match="cannot be written"):
        Bundle.make(source, tmp_path / "file/bundles")


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_the_job_needs_must_be_there(source, into):
    write(source, {".gitignore": "*.log\n", "x.log": ""})
    text = refusal(
        source, into, must_have=["tain.py", "requirements.txt", "x.log", "./pkg/__init__.py", ".cloudtrain/train.py"]
    )
    assert "tain.py is not there; there is train.py" in text
    assert "requirements.txt is not there\n" in text + "\n"
    assert "x.log is not packaged: git ignores it (.gitignore:1: *.log)" in text
    assert "__init__" not in text and ".cloudtrain" not in text
    Bundle.make(source, into, must_have=["train.py"])


def test_credentials_are_refused_and_nothing_of_them_is_shown(source, into):
    secret = "ghp_" + "aB3" * 12
    write(source, {"conf/.env": "", "a.py": f"\ntoken = '{secret}'\n"})
    write(source, {"b.bin": b"\0" + secret.encode(), "c": "x" * (4 << 20) + " " + secret})
    with pytest.raises(BadSource) as caught:
        Bundle.make(source, into)
    text = str(caught.value)
    assert "in 2 files:\n  a.py:2  GitHub token\n  conf/.env  environment file (by its name)" in text
    assert secret not in text + caught.value.hint and secret[4:12] not in text
    assert "b.bin" not in text and "c:" not in text  # binary, and over the bound that guard.py states
    assert not into.exists()
    assert "a.py" not in refusal(source, into, allow_secrets=["/a.py"])
    assert len(Bundle.make(source, into, allow_secrets=["/a.py", "conf/"]).files) == 9


def test_our_own_files_are_not_searched(source, into, tmp_path, monkeypatch):
    ours = write(tmp_path / "ours", {"launch.py": "ghp_" + "aB3" * 12})
    monkeypatch.setattr(bundle, "runtime_files", lambda *_: [(".cloudtrain/launch.py", ours / "launch.py")])
    Bundle.make(source, into)


def test_files_that_cannot_be_read_are_all_named(into):
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder), {"a": "", "b": "", "c": ""})
        root.chmod(0o755)
        (root / "a").chmod(0)
        (root / "c").chmod(0)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may read everything
        try:
            text = refusal(root, into)
        finally:
            os.seteuid(user)
    assert "a cannot be read: Permission denied" in text and "c cannot be read" in text and "b cannot" not in text


def test_an_installation_without_entrypoints(source, into, tmp_path, monkeypatch):
    monkeypatch.setattr(node_code, "__file__", str(tmp_path / "lib/cloudtrain/source/bundle.py"))
    with pytest.raises(StoreError, match="the files that run a job on a node are missing"):
        Bundle.make(source, into)


# -- files that change meanwhile --------------------------------------------------------------------------------------


def meddle(monkeypatch, action, times: int) -> list[int]:
    """Do something to the source between the reading and the packing, the first few times."""
    done: list[int] = []
    pack = bundle._pack

    def packing(*arguments):
        done.append(1)
        if len(done) <= times:
            action(len(done))
        return pack(*arguments)

    monkeypatch.setattr(bundle, "_pack", packing)
    return done


def test_a_file_that_changes_once_is_packaged_as_it_is_then(source, into, monkeypatch):
    done = meddle(monkeypatch, lambda n: write(source, {"train.py": f"print({n:04})\n"}), 1)
    made = Bundle.make(source, into)
    made.extract(into.parent / "x")
    assert (into.parent / "x/train.py").read_text() == "print(0001)\n" and len(done) == 2
    assert leftovers(into) == []


@pytest.mark.parametrize("how", ["content", "shorter", "gone", "pipe"])
def test_a_file_that_keeps_changing_is_refused(source, into, monkeypatch, how):
    def action(n):
        if how in ("gone", "pipe"):
            (source / "train.py").unlink()
        if how == "pipe":
            os.mkfifo(source / "train.py")
        elif how != "gone":
            write(source, {"train.py": f"print({n:04})\n" if how == "content" else "x" * (10 - n)})

    def again(*arguments):
        write(source, {"train.py": "print('hi')\n"}) if not (source / "train.py").is_fifo() else os.unlink(
            source / "train.py"
        )
        write(source, {"train.py": "print('hi')\n"})
        return members(*arguments)

    meddle(monkeypatch, action, 9)
    members = bundle.Source.of
    if how != "content":
        monkeypatch.setattr(bundle.Source, "of", again)
    assert "changes while cloudtrain packages it" in refusal(source, into)
    assert list(into.iterdir()) == []


def test_a_log_that_grows_does_not_disturb(source, into, monkeypatch):
    def grow(n):
        with open(source / "train.py", "a") as stream:
            stream.write("# more\n")

    done = meddle(monkeypatch, grow, 9)
    made = Bundle.make(source, into)
    assert len(done) == 1 and next(file for file in made.files if file.path == "train.py").size == 12


# -- unpacking --------------------------------------------------------------------------------------------------------


def test_extracting_gives_the_source_back(source, into, tmp_path):
    made = Bundle.make(source, into)
    made.extract(tmp_path / "deep/x")
    unpacked = content(tmp_path / "deep/x")
    original = {name: value for name, value in content(source).items() if not name.startswith(".git")}
    assert {name: value for name, value in unpacked.items() if not name.startswith(".cloudtrain/")} == original
    assert unpacked[".cloudtrain/launch.py"] == ((ROOT / "entrypoints/launch.py").read_bytes(), 0o644)
    (tmp_path / "empty").mkdir()
    made.extract(tmp_path / "empty")
    assert content(tmp_path / "empty") == unpacked


def test_extracting_never_mixes_with_what_is_there(source, into, tmp_path):
    made = Bundle.make(source, into)
    target = write(tmp_path / "x", {"mine": "1"})
    with pytest.raises(StoreError, match="cannot be written"):
        made.extract(target)
    assert content(target) == {"mine": (b"1", 0o644)}
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "other", "hostile", "gone"])
def test_a_damaged_bundle_leaves_nothing(source, into, tmp_path, damage):
    made = Bundle.make(source, into)
    if damage == "cut":
        made.path.write_bytes(made.path.read_bytes()[:-30])
    elif damage == "other":  # a whole archive, but not of this name
        made.path.write_bytes(Bundle.make(write(tmp_path / "other", {"a": ""}), into).path.read_bytes())
    elif damage == "hostile":
        data = archive.header(archive.Entry("../evil", 1, 0o644)) + b"x" + archive.padding(1) + archive.END
        made.path.write_bytes(gzip.compress(data))
    else:
        made.path.unlink()
    with pytest.raises(StoreError) as caught:
        made.extract(tmp_path / "x")
    assert caught.value.hint
    assert not (tmp_path / "x").exists() and not (tmp_path / "evil").exists() and leftovers(tmp_path) == []


def test_memory_does_not_grow_with_the_source(tmp_path, into):
    root = write(tmp_path / "source", {"small.py": ""})
    with open(root / "big.bin", "wb") as stream:
        for _ in range(12):
            stream.write(os.urandom(16 << 20))
    code = """
import resource, sys
from pathlib import Path
from cloudtrain.source.bundle import Bundle
source, into, out = map(Path, sys.argv[1:])
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(source / "big.bin").rename(source.parent / "big.bin")
Bundle.make(source, into).extract(out / "1")
before = peak()
(source.parent / "big.bin").rename(source / "big.bin")
Bundle.make(source, into).extract(out / "2")
print(peak() - before)
"""
    assert int(python(code, root, into, tmp_path / "out")) < 48 << 10  # KiB; the file has 192 MiB
