"""The archive: fixed bytes that every tar reads, and hostile ones that are refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.errors import StoreError
from cloudtrain.source import archive
from cloudtrain.source.archive import LINK, Entry


def packed(*members: tuple[Entry, bytes]) -> bytes:
    blocks = [archive.header(entry) + data + archive.padding(len(data)) for entry, data in members]
    return b"".join(blocks) + archive.END


def plain(path: str, data: bytes = b"", mode: int = 0o644) -> tuple[Entry, bytes]:
    return Entry(path, len(data), mode), data


def link(path: str, target: str) -> tuple[Entry, bytes]:
    return Entry(path, len(target.encode()), LINK, target), b""


def unpack(data: bytes, into) -> str:
    into.mkdir()
    digest = hashlib.sha256()
    archive.extract(io.BytesIO(data), into, digest.update)
    return digest.hexdigest()


LONG = "d" * 60 + "/" + "f" * 60


def test_the_bytes_are_fixed():
    data = packed(plain("a.py", b"print()\n", 0o755), link("l", "a.py"), plain("späße"), plain(LONG, b"x"))
    assert hashlib.sha256(data).hexdigest() == "2c3f27b15a13b663539b2250aeffeb958e10f3406acdc8eecb6e507fa84162f9"


def test_every_tar_reads_it(tmp_path):
    files = [plain("a", b"1" * 512, 0o755), plain("dir/é\n", b"2"), plain(LONG, b"3")]
    members = [*files, link("l", "a"), link("m", LONG), link("n", "dir/é\n")]
    with tarfile.open(fileobj=io.BytesIO(packed(*members))) as tar:
        infos = tar.getmembers()
        assert [(info.name, info.mode, info.linkname) for info in infos] == [
            (entry.path, 0o777 if entry.mode == LINK else entry.mode, entry.target) for entry, _ in members
        ]
        assert {(info.uid, info.gid, info.uname, info.gname, info.mtime) for info in infos} == {(0, 0, "", "", 0)}
        assert [tar.extractfile(info).read() for info in infos[:3]] == [data for _, data in files]


def test_sizes_beyond_the_old_header():
    data = archive.header(Entry("big", 9 << 30, 0o644))
    with tarfile.open(fileobj=io.BytesIO(data + archive.END), ignore_zeros=False) as tar:
        assert tar.next().size == 9 << 30


PATH = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=120)
PATH = st.lists(PATH.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3).map("/".join)


def test_a_record_counts_its_own_digits():
    for length in (*range(80, 115), *range(985, 1000)):
        name = "é" + "n" * length
        with tarfile.open(fileobj=io.BytesIO(packed(link("l", name)))) as tar:
            assert tar.next().linkname == name


@settings(max_examples=100, deadline=None)
@given(path=PATH, target=PATH, data=st.binary(max_size=1100))
def test_headers_say_what_they_were_told(path, target, data):
    blocks = packed(plain(path, data), link("link", target))
    with tarfile.open(fileobj=io.BytesIO(blocks)) as tar:
        assert [(info.name, info.linkname, info.size) for info in tar] == [(path, "", len(data)), ("link", target, 0)]


def test_extracting_gives_back_content_modes_and_links(tmp_path):
    members = [
        plain("a", b"1" * 3_000_000, 0o755),
        plain("d/e/é", b"2"),
        plain(LONG, b""),
        link("d/l", "../a"),
        link("m", "d/e"),
    ]
    before = os.umask(0o077)
    try:
        digest = unpack(gzip.compress(packed(*members)), tmp_path / "x")
    finally:
        os.umask(before)
    assert digest == hashlib.sha256(packed(*members)).hexdigest()
    root = tmp_path / "x"
    assert (root / "a").read_bytes() == b"1" * 3_000_000
    assert ((root / "a").stat().st_mode & 0o777, (root / LONG).stat().st_mode & 0o777) == (0o755, 0o644)
    assert (os.readlink(root / "d/l"), os.readlink(root / "m")) == ("../a", "d/e")
    assert (root / "m/é").read_bytes() == b"2"


def forged(**changes) -> bytes:
    info = tarfile.TarInfo(changes.pop("name", "x"))
    for key, value in {"mode": 0o644, "mtime": 0, **changes}.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.PAX_FORMAT) + archive.END


def pax(size: int) -> bytes:
    return archive._block(b"././@PaxHeader", 0o644, size, b"x", b"")


HOSTILE = {
    "absolute": packed(plain("/tmp/evil", b"x")),
    "dotdot": packed(plain("a/../../evil", b"x")),
    "dot": packed(plain("./a", b"x")),
    "empty part": packed(plain("a//b", b"x")),
    "the parent itself": packed(plain("..", b"x")),
    "link out": packed(link("l", "../evil")),
    "absolute link": packed(link("l", "/etc/passwd")),
    "link out by way of links": packed(link("a/b/up", "../.."), plain("a/b/c"), link("l", "a/b/up/../evil")),
    "through a link": packed(link("l", "d"), plain("d/x"), plain("l/evil", b"x")),
    "through a link that comes later": packed(plain("l/evil", b"x"), link("l", "/tmp")),
    "name twice": packed(plain("a", b"1"), plain("a", b"2")),
    "file and folder": packed(plain("a", b"1"), plain("a/b", b"2")),
    **{f"kind {kind}": archive._block(b"x", 0o644, 0, kind.encode(), b"/etc/passwd") + archive.END for kind in "134567gKLSV"},
    "setuid": archive._block(b"x", 0o4755, 0, b"0", b"") + archive.END,
    "written by somebody else": forged(),
    "owner's name": forged(uname="root"),
    "record of another kind": pax(13) + b"13 comment=x\n".ljust(512, b"\0") + packed(plain("a")),
    "record behind a record": pax(9) + b"9 path=x\n".ljust(512, b"\0") + pax(9) + b"9 path=x\n".ljust(512, b"\0") + archive.END,
    "size that is not a number": pax(9) + b"9 size=x\n".ljust(512, b"\0") + packed(plain("a")),
    "negative size": pax(11) + b"11 size=-1\n".ljust(512, b"\0") + packed(plain("a")),
    "bad checksum": b"y" + packed(plain("x"))[1:],
    "junk": b"junk" * 400,
    "cut": packed(plain("a", b"x" * 2000))[:1000],
    "no end": packed(plain("a"))[:-512],
    "more behind the end": packed(plain("a")) + packed(plain("b")),
    "negative length of a record": pax(9) + b"-9 path=x".ljust(512, b"\0") + archive.END,
    "endless record": pax(1 << 32) + archive.END,
    "huge": archive.header(Entry("big", 1 << 50, 0o644)) + archive.END,
    "zero byte": packed(plain("a\0b")),
    "name that is no utf-8": archive._block(b"caf\xe9", 0o644, 0, b"0", b"") + archive.END,
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archives_are_refused_and_write_nothing_outside(tmp_path, kind):
    (tmp_path / "in").mkdir()
    with pytest.raises((StoreError, OSError)):
        unpack(gzip.compress(HOSTILE[kind], 1), tmp_path / "in/x")
    assert not (tmp_path / "evil").exists() and not (tmp_path / "in/evil").exists()
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["x"]
    assert not os.path.exists("/tmp/evil")


def test_a_bomb_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 1 << 20)
    with pytest.raises(StoreError):
        unpack(gzip.compress(packed(plain("a", bytes(900_000)), plain("b", bytes(900_000)))), tmp_path / "x")


@pytest.mark.parametrize("damage", ["empty", "other", "cut", "longer", "checksum"])
def test_damaged_compression_is_refused(tmp_path, damage):
    good = gzip.compress(packed(plain("a")))
    bad = {"empty": b"", "other": b"not gzip at all", "cut": good[:-12], "longer": good + b"x",
           "checksum": good[:-8] + bytes(4) + good[-4:]}  # fmt: skip
    with pytest.raises(StoreError):
        unpack(bad[damage], tmp_path / "x")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_flipped_byte_is_taken_for_a_whole_archive(tmp_path_factory, data):
    good = packed(plain("a", b"1" * 100), link("l", "a"), plain(LONG, b"2"))
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    try:
        digest = unpack(gzip.compress(bad, 0), tmp_path_factory.mktemp("flip") / "x")
    except (StoreError, OSError):
        return
    assert digest != hashlib.sha256(good).hexdigest()  # what headers cannot show, the digest does


@pytest.mark.parametrize(
    ("path", "links", "out"),
    [
        ("l", {"l": "a"}, False),
        ("l", {"l": "."}, False),
        ("d/l", {"d/l": ".."}, False),
        ("d/l", {"d/l": "../.."}, True),
        ("l", {"l": "l"}, False),
        ("l", {"l": "m", "m": "l"}, False),
        ("l", {"l": "d/../.."}, True),
        ("l", {"l": "m/../x", "m": "a/b"}, False),
        ("l", {"l": "m/../../x", "m": "a/b"}, False),
        ("l", {"l": "m/../../../x", "m": "a/b"}, True),
        ("l", {"l": "a//./b/"}, False),
        ("l", {"l": "/"}, True),
    ],
)
def test_where_links_lead(path, links, out):
    assert archive.leads_out(path, links) is out


# -- on a node, which has no isal -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 511, 512, archive.PIECE - 1536, archive.PIECE, 3 * archive.PIECE + 7])
@pytest.mark.parametrize("random", [False, True])
def test_the_standard_library_unpacks_the_same(tmp_path, monkeypatch, size, random):
    data = gzip.compress(packed(plain("a/b", os.urandom(size) if random else bytes(size)), plain("c", b"x" * size)))
    whole = unpack(data, tmp_path / "isal")
    monkeypatch.setitem(sys.modules, "isal", None)
    assert unpack(data, tmp_path / "zlib") == whole
    for name in ("a/b", "c"):
        assert (tmp_path / "zlib" / name).read_bytes() == (tmp_path / "isal" / name).read_bytes()
    for damage in (data[:-20], data[:-4] + b"\0\0\0\1", data + b"x", data[: len(data) // 2]):
        with pytest.raises(StoreError):
            unpack(damage, tmp_path / f"damaged-{len(damage)}")
