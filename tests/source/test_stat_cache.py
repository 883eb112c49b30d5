"""The stat cache: what is unchanged is not read, and what changed always is, whatever the clock's grain."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudtrain.errors import BadSource
from cloudtrain.source import archive, bundle, digests, secrets
from cloudtrain.source.bundle import Bundle
from tests.source.trees import git, repository, tick, write

FILES = {"a.py": "print(1)\n", "d/b.bin": b"\0" * 5000, "d/c.txt": "text", "empty": ""}


@pytest.fixture
def source(tmp_path) -> Path:
    return repository(tmp_path / "source", FILES)


@pytest.fixture
def into(tmp_path) -> Path:
    return tmp_path / "home" / "bundles"


@pytest.fixture
def later(monkeypatch) -> Callable[[float], None]:
    """Let time pass: what was written before is no longer racy."""

    def move(seconds: float) -> None:
        now = digests.clock_ns
        monkeypatch.setattr(digests, "clock_ns", lambda: now() + int(seconds * 1e9))

    return move


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Names the user's files that are opened."""
    names: list[str] = []
    opened = digests.opened

    def opening(member):
        if not member.ours:
            names.append(member.entry.path)
        return opened(member)

    monkeypatch.setattr(digests, "opened", opening)
    monkeypatch.setattr(bundle, "opened", opening)
    return names


def cache_file(into: Path) -> Path:
    (path,) = (into / digests.FOLDER).glob("*.json")
    return path


def make(source, into, read) -> tuple[Bundle, list[str]]:
    read.clear()
    return Bundle.make(source, into), sorted(read)


def test_an_unchanged_tree_is_not_read_again(source, into, read, later):
    later(5)
    first, names = make(source, into, read)
    assert names == sorted([*FILES, *FILES])  # once to know it, once to pack it
    before = digests.signature(cache_file(into).stat())
    assert make(source, into, read) == (first, [])
    assert digests.signature(cache_file(into).stat()) == before  # nor is the cache written


def test_what_has_only_just_changed_is_read_once_more(source, into, read, later):
    first, _ = make(source, into, read)
    assert make(source, into, read) == (first, sorted(FILES))
    later(5)
    assert make(source, into, read) == (first, sorted(FILES))  # now it is known
    assert make(source, into, read) == (first, [])


def test_a_change_within_the_grain_of_the_clock_is_seen(source, into, read, monkeypatch):
    """The file system's clock stands still, size and inode stay: only reading can tell."""
    path = source / "a.py"
    frozen = path.stat()
    monkeypatch.setattr(digests, "signature", lambda found: [found.st_size, 1, 1, 1, found.st_mode])
    monkeypatch.setattr(digests, "signature", lambda found: [found.st_size, 1, 1, 1, found.st_mode])
    first, _ = make(source, into, read)
    path.write_text("print(2)\n")
    os.utime(path, ns=(frozen.st_atime_ns, frozen.st_mtime_ns))
    second, names = make(source, into, read)
    assert "a.py" in names and second.sha256 != first.sha256


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda root: (root / "a.py").write_text("print(2)\n"),
    "content, time set back": lambda root: (
        (at := (root / "a.py").stat().st_mtime_ns),
        (root / "a.py").write_text("print(2)\n"),
        os.utime(root / "a.py", ns=(at, at)),
    ),
    "another file in its place": lambda root: (
        (at := (root / "a.py").stat().st_mtime_ns),
        (root / "new").write_text("print(2)\n"),
        os.utime(root / "new", ns=(at, at)),
        (root / "new").replace(root / "a.py"),
    ),
    "mode": lambda root: (root / "a.py").chmod(0o755),
    "touched": lambda root: os.utime(root / "a.py"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_changed_is_read(source, into, read, later, change, tmp_path):
    later(5)
    first, _ = make(source, into, read)
    tick(source)
    CHANGES[change](source)
    second, names = make(source, into, read)
    known = change in ("touched",)
    assert names == (["a.py"] if known else sorted(["a.py", *FILES]))
    assert (second.sha256 == first.sha256) is known
    assert Bundle.make(source, tmp_path / "another").sha256 == second.sha256


def test_one_cache_for_each_source_and_one_archive_for_the_same_files(source, into, read, later, tmp_path):
    later(5)
    first, _ = make(source, into, read)
    other, names = make(write(tmp_path / "other", FILES), into, read)
    assert other.sha256 == first.sha256 and names == sorted(FILES)  # read, but not packed
    assert len(list((into / digests.FOLDER).glob("*.json"))) == 2
    assert make(source, into, read) == (first, [])


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "garbage", "a folder", "no json"])
def test_a_damaged_cache_counts_as_empty(source, into, read, later, damage):
    later(5)
    first, _ = make(source, into, read)
    path = cache_file(into)
    data = path.read_bytes()
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        at = data.index(b"a.py")
        path.write_bytes({"empty": b"", "cut": data[:-9], "flipped": data[:at] + b"b" + data[at + 1 :], "garbage": b"\xff" * 99,
                          "no json": b"0" * 64 + b"\n{"}[damage])  # fmt: skip
    assert make(source, into, read) == (first, sorted(FILES))
    assert make(source, into, read)[1] == (sorted(FILES) if damage == "a folder" else [])


@pytest.mark.parametrize("damage", ["", "..", "0" * 64, "\xff"])
def test_a_damaged_key_means_packing_again(source, into, read, later, damage):
    later(5)
    first, _ = make(source, into, read)
    (key,) = (path for path in (into / digests.FOLDER).iterdir() if path.suffix != ".json")
    key.write_bytes(damage.encode("latin-1"))
    assert make(source, into, read) == (first, sorted(FILES))
    assert make(source, into, read) == (first, [])


def test_a_key_that_names_another_source_is_not_believed(source, into, later, tmp_path):
    first = Bundle.make(source, into)
    other = Bundle.make(write(tmp_path / "other", {"x": "1"}), into)
    for key in (into / digests.FOLDER).iterdir():
        if key.suffix != ".json":
            key.write_text(other.sha256)
    assert Bundle.make(source, into) == first


def test_other_rules_and_another_format_make_it_new(source, into, read, later, monkeypatch):
    later(5)
    first, _ = make(source, into, read)
    monkeypatch.setattr(secrets.credentials(), "VERSION", 99)
    assert make(source, into, read) == (first, sorted(FILES))
    monkeypatch.setattr(archive, "FORMAT", b"another")
    assert make(source, into, read) == (first, sorted(FILES))  # packed, not read to be known


def test_findings_are_kept_but_nothing_of_the_credential(source, into, read, later):
    token = "npm_" + "aB3" * 12
    write(source, {"token.txt": f"\n{token}\n"})
    later(5)
    allowed = Bundle.make(source, into, allow_secrets=["token.txt"])
    read.clear()
    assert Bundle.make(source, into, allow_secrets=["token.txt"]) == allowed and read == []
    with pytest.raises(BadSource, match="token.txt:2  npm token"):
        Bundle.make(source, into)
    assert token not in cache_file(into).read_text()


def test_a_cache_that_lies_is_found_out_by_packing(source, into, read, later):
    later(5)
    first, _ = make(source, into, read)
    path = cache_file(into)
    rules, entries = json.loads(path.read_bytes().partition(b"\n")[2])
    entries["a.py"][5] = "0" * 64
    body = json.dumps([rules, entries]).encode()
    path.write_bytes(digests.hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert make(source, into, read)[0] == first
    assert make(source, into, read) == (first, [])


def test_a_file_that_changes_while_it_is_read_is_not_kept(source, into, read, later, monkeypatch):
    pieces = digests.pieces

    def growing(fd, entry):
        yield from pieces(fd, entry)
        if entry.path == "a.py":
            with open(source / "a.py", "a") as stream:
                stream.write("# more\n")

    later(5)
    monkeypatch.setattr(digests, "pieces", growing)
    Bundle.make(source, into)
    assert set(FILES) - set(json.loads(cache_file(into).read_bytes().partition(b"\n")[2])[1]) == {"a.py"}


def test_packers_at_once_leave_a_whole_cache_and_agree(source, into, later, read):
    write(source, {f"f{number}": os.urandom(3000) for number in range(30)})
    later(5)
    found: list[Bundle] = []
    threads = [
        threading.Thread(target=lambda: found.extend(Bundle.make(source, into) for _ in range(4))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(found)) == 1
    assert make(source, into, read) == (found[0], [])
    assert not [path for path in into.rglob("*") if ".tmp" in path.name]


def test_a_cache_that_cannot_be_written_is_done_without(source, into, later, read):
    later(5)
    first = Bundle.make(source, into)
    path = cache_file(into)
    path.unlink()
    path.mkdir()
    (path / "in the way").write_text("")
    assert Bundle.make(source, into) == first
    assert not [path for path in into.rglob("*") if ".tmp" in path.name]


def test_a_commit_reads_nothing(source, into, read, later):
    later(5)
    write(source, {"new.py": "1"})
    first, _ = make(source, into, read)
    git(source, "add", "-A")
    git(source, "commit", "-qm", "more")
    second, names = make(source, into, read)
    assert (names, second.sha256, second.dirty) == ([], first.sha256, False)
    assert second.commit != first.commit


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "append", "chmod", "remove", "swap", "back"]),
        st.sampled_from("abc"),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=STEPS, wait=st.booleans())
def test_whatever_happens_the_digest_is_that_of_no_cache(tmp_path_factory, monkeypatch, steps, wait):
    folder = tmp_path_factory.mktemp("steps")
    root = write(folder / "source", {"always": "", "a": "1", "b": "22", "c": "333"})
    with monkeypatch.context() as patch:
        if wait:
            now = digests.clock_ns
            patch.setattr(digests, "clock_ns", lambda: now() + 5_000_000_000)
        Bundle.make(root, folder / "bundles")
        for number, (step, name, value) in enumerate(steps):
            tick(root)
            change(root, root / name, step, value)
            made = Bundle.make(root, folder / "bundles")
            fresh = Bundle.make(root, folder / f"fresh-{number}")
            assert (made.sha256, made.source_sha256, made.files) == (fresh.sha256, fresh.source_sha256, fresh.files)


def change(root: Path, path: Path, step: str, value: int) -> None:
    """Do one thing to a file; what it cannot be done to stays as it is."""
    if step == "write":
        path.write_text(str(value))
    elif step == "append":
        with open(path, "a") as stream:
            stream.write(str(value))
    elif step == "remove":
        path.unlink(missing_ok=True)
    elif path.exists():
        if step == "chmod":
            path.chmod((0o644, 0o755, 0o600, 0o700)[value])
        elif step == "swap":
            (root / "other").write_text("x" * path.stat().st_size)
            (root / "other").replace(path)
        else:
            at = path.stat().st_mtime_ns
            path.write_text("y" * path.stat().st_size)
            os.utime(path, ns=(at, at))
