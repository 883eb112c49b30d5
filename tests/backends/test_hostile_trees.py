"""Several fetches of a stranger's output into one folder: nothing outside of it changes, and it holds what may come."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from launcher.errors import Refused
from launcher.prepare import inputs

from cloudtrain.backends import checkpoints
from cloudtrain.backends.store import download
from cloudtrain.backends.store.download import StoredObject
from cloudtrain.backends.store.open import opened
from cloudtrain.backends.store.s3 import S3 as S3Objects
from cloudtrain.errors import BackendError, CloudtrainError
from cloudtrain.nodes.agents import LocalAgent
from cloudtrain.nodes.transfer import download_folder
from cloudtrain.source import folder_writer
from tests.backends.hostile_trees import (
    MTIME_NS,
    Conflict,
    Folder,
    Node,
    Tree,
    build,
    census,
    draw,
    on_disk,
    pack,
    parents,
)
from tests.conftest import WAIT_S
from tests.stores import GCS, S3, running

PLANTED = "../../../outside"
Fetch = Callable[[Tree, Path, Path], None]


def fetch_folder(tree: Tree, remote: Path, into: Path) -> None:
    build(tree, remote / "outputs")
    opened(str(remote)).bring("outputs", into)


def fetch_from_machine(tree: Tree, remote: Path, into: Path) -> None:
    build(tree, remote)
    download_folder(LocalAgent(), str(remote), into)


def fetch_objects(tree: Tree, remote: Path, into: Path) -> None:
    download.download_all([stored(name, node.data.encode()) for name, node in tree.items()], into)


def fetch_archive(tree: Tree, remote: Path, into: Path) -> None:
    remote.mkdir()
    pack(tree, remote / "model.tar.gz")
    found = stored(f".{into.name}.tar.gz", (remote / "model.tar.gz").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Objects, "look_up", lambda *_: found)
        S3Objects(None, "s3://bucket").bring_archive("model.tar.gz", into)  # type: ignore[arg-type]


@contextmanager
def fetch_from_store(kind: type[S3] | type[GCS]) -> Iterator[Fetch]:
    """Yield what fetches a tree's files from a store of its own, as an attached run does."""
    with running(kind) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environ.items():
            patch.setenv(name, value)

        def fetch(tree: Tree, remote: Path, into: Path) -> None:
            for name, node in tree.items():
                store.put(f"out/outputs/{name}", node.data.encode())
            opened(f"{store.scheme}://bucket/out").bring("outputs", into)

        yield fetch


def stored(name: str, data: bytes) -> StoredObject:
    def read(first: int, last: int):
        yield data[first : last + 1]

    time_ns = MTIME_NS + random.getrandbits(50)
    return StoredObject(name, f"s3://bucket/{name}", len(data), name, time_ns, read, lambda _: None, lambda: None)


# What of a tree each kind of fetch can see.
SEEN: dict[Fetch, Callable[[Node], bool]] = {
    fetch_folder: lambda node: True,
    fetch_from_machine: lambda node: node.kind != "folder",
    fetch_objects: lambda node: node.kind == "file",
    fetch_archive: lambda node: node.kind != "fifo",
}


class Sequence:
    """Fetches into one folder of a home that has other files."""

    def __init__(self, top: Path) -> None:
        self.top, self.into, self.model = top, top / "home/fetched/outputs", Folder()
        self.into.mkdir(parents=True)
        for name in ("outside/a", "home/.ssh/authorized_keys", "home/fetched/model/a"):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text("mine")
        (top / "home/fetched/model/link").symlink_to("a")
        (top / "remote").mkdir()
        self.before = self.outside()

    def outside(self) -> dict[str, tuple[object, ...]]:
        found = census(self.top, self.into)
        return {name: about for name, about in found.items() if not name.startswith(str(self.top / "remote"))}

    def places(self) -> tuple[Path, Path]:
        """Return where the next tree is made, and where it is fetched to."""
        remote = self.top / "remote/tree"
        shutil.rmtree(remote, ignore_errors=True)
        return remote, self.into

    def fetch(self, fetch: Fetch, tree: Tree) -> Tree | None:
        """Fetch a tree and compare; returns what of it came, None where the fetch was refused."""
        tree = {name: node for name, node in tree.items() if SEEN[fetch](node)}
        if fetch is fetch_objects:
            tree = {name: node._replace(mode=0o644) for name, node in tree.items()}
        if fetch is fetch_folder:
            tree = {at: Node("folder") for name in tree for at in parents(name)} | tree
        remote, into = self.places()
        try:
            came = self.model.receive(tree)
        except Conflict:
            with pytest.raises(CloudtrainError, match="cannot be written"):
                fetch(tree, remote, into)
            (self.into.parent / ".outputs.tar.gz").unlink(missing_ok=True)  # the next fetch needs not download it again
            came = None
        else:
            fetch(tree, remote, into)
            assert self.outside() == self.before
            assert on_disk(self.into) == self.model.read()
        self.model.nodes = on_disk(self.into)
        assert self.outside() == self.before
        for name, node in self.model.nodes.items():
            if node.kind == "link" and node.data != PLANTED:
                assert Path(os.path.realpath(self.into / name)).is_relative_to(self.into), name
        return came


# Nobody sees in one tree alone that x leads to home/.ssh, once a/b/c is a link.
THREE: list[Tree] = [
    {"x": Node("link", "a/b/c/../../../.ssh"), "k/f": Node("file", "1")},
    {"a/b/c": Node("link", "../../k")},
    {"x/authorized_keys": Node("file", "evil")},
]


@pytest.mark.parametrize("fetch", [fetch_folder, fetch_from_machine, fetch_archive])
def test_links_of_earlier_fetches_are_not_written_through(tmp_path: Path, fetch: Fetch):
    sequence = Sequence(tmp_path)
    for tree in THREE:
        fetch(tree, *sequence.places())
        assert sequence.outside() == sequence.before
    assert (sequence.into / "x/authorized_keys").read_text() == "evil"


@pytest.mark.parametrize("store", [S3, GCS])
def test_a_link_that_an_older_version_left_is_replaced(tmp_path: Path, store: type[S3] | type[GCS]):
    sequence = Sequence(tmp_path)
    with fetch_from_store(store) as from_store:
        for at, fetch in enumerate((fetch_folder, fetch_from_machine, fetch_archive, from_store)):
            name = f"{at}/x"
            (sequence.into / f"{at}").mkdir()
            for planted, target in (
                (name, "../../../.ssh"),
                (f"{at}/.z.part", "../../../.ssh/new"),
                (f"{at}/z", "/new"),
            ):
                (sequence.into / planted).symlink_to(target)
            fetch({f"{name}/authorized_keys": Node("file", "evil"), f"{at}/z": Node("file", "2")}, *sequence.places())
            assert sequence.outside() == sequence.before
            assert (sequence.into / name / "authorized_keys").read_text() == "evil"
            assert (sequence.into / f"{at}/z").read_text() == "2" and not (sequence.into / f"{at}/z").is_symlink()


@pytest.mark.parametrize("link", ["audit", "audit/a.json", ""])
def test_a_record_added_to_an_output_follows_no_link_there(tmp_path: Path, link: str):
    (tmp_path / "mine").mkdir()
    (tmp_path / "out/run/audit").mkdir(parents=True)
    output = opened(str(tmp_path / "out/run"), may_be_link=False)
    output.add("audit/first.json", b"{}")
    output.add("audit/first.json", b"another one")
    assert (tmp_path / "out/run/audit/first.json").read_bytes() == b"{}"
    shutil.rmtree(tmp_path / "out/run" if not link else tmp_path / "out/run/audit")
    place = tmp_path / "out/run" / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(tmp_path / ("mine/new" if link.endswith("json") else "mine"))
    if link.endswith("json"):
        output.add("audit/a.json", b"{}")  # it is there, so it stays
    else:
        with pytest.raises(BackendError, match="cannot be written"):
            output.add("audit/a.json", b"{}")
    assert place.is_symlink() and list((tmp_path / "mine").iterdir()) == []


def test_checkpoints_that_move_up_follow_no_link(tmp_path: Path):
    sequence = Sequence(tmp_path)
    tree = {"x/authorized_keys": Node("file", "evil"), "last": Node("link", "x"), "out": Node("link", "..")}
    build({f"checkpoint_dir/{name}": node for name, node in tree.items()}, sequence.into / "c")
    build({"run.json": Node("file", "{}")}, sequence.into / "c/.cloudtrain")
    (sequence.into / "c/x").symlink_to("../../../.ssh")
    checkpoints.lift(sequence.into / "c")
    assert sequence.outside() == sequence.before
    assert set(on_disk(sequence.into / "c")) == {"x", "x/authorized_keys", "last"}


class Drawn(NamedTuple):
    """One sequence: the folder after it, what each fetch brought, and what may have come of it, up to a refusal."""

    planted: bool  # an older version left a link that leads out, where files come now
    held: Tree
    fetched: list[Tree]
    came: list[Tree]


def draw_sequence(number: int, top: Path) -> Drawn:
    """Draw a sequence of fetches and run it."""
    random_ = random.Random(number)
    sequence, drawn = Sequence(top), Drawn(random_.random() < 0.3, {}, [], [])
    if drawn.planted:
        (sequence.into / "a").symlink_to(PLANTED)
        sequence.model.nodes["a"] = Node("link", PLANTED)
    for _ in range(random_.randint(2, 5)):
        fetch, tree = random_.choice(list(SEEN)), draw(random_)
        before = on_disk(sequence.into)
        arrived = sequence.fetch(fetch, tree)
        if arrived is None:
            return drawn._replace(held=before)
        drawn.fetched.append(tree)
        drawn.came.append(arrived)
    return drawn._replace(held=on_disk(sequence.into))


def test_drawn_sequences_of_fetches_change_nothing_outside(tmp_path: Path):
    for number in range(60):
        draw_sequence(number, tmp_path / f"{number}")
        shutil.rmtree(tmp_path / f"{number}")


def test_drawn_archives_as_inputs_of_a_node_come_whole_or_not_at_all(tmp_path: Path):
    came = 0
    for number in range(100):
        tree, model, path = draw(random.Random(number)), Folder(), tmp_path / f"{number}.tar.gz"
        pack(tree, path)
        wanted, log = {"model": {"uri": str(path), "run": "first"}}, SimpleNamespace(say=str)
        if model.receive_whole(tree):
            found = inputs.resolve(wanted, str(tmp_path / f"{number}"), log)["model"]
            assert on_disk(Path(found)) == model.read()
            came += 1
        else:
            with pytest.raises(Refused, match="the input model cannot be unpacked: .*"):
                inputs.resolve(wanted, str(tmp_path / f"{number}"), log)
            assert on_disk(tmp_path / f"{number}") in ({}, {".unpacked": Node("folder")})
    assert 10 < came < 90
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{n}{end}" for n in range(100) for end in ("", ".tar.gz")
    )


JAIL = """
set -eu
cd "$1"
mkdir -p usr && mount --rbind /usr usr
for name in bin lib lib64 sbin; do test -e $name || ln -s usr/$name $name; done
chroot . /bin/sh -euc '
for folder in /[0-9]*; do
    cd "$folder"
    for archive in came/*.tar; do tar -xf "$archive" -C home/fetched/outputs; done
    for archive in fetched/*.tar; do
        tar -xPf "$archive" --keep-directory-symlink -C home/fetched/naive 2>>/errors || true
    done
done'
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.parametrize("shard", range(10))
def test_two_thousand_sequences_leave_what_gnu_tar_leaves_in_a_namespace(tmp_path: Path, shard: int):
    """tar gets what may come. Given all, and told to follow links, it writes outside, though only in its namespace."""
    jail, held = tmp_path / "jail", {}
    for number in range(200 * shard, 200 * (shard + 1)):
        drawn = draw_sequence(number, tmp_path / "ours")
        shutil.rmtree(tmp_path / "ours")
        top = jail / f"{number}"
        for folder in ("outside", "home/fetched/outputs", "home/fetched/naive", "came", "fetched"):
            (top / folder).mkdir(parents=True)
        for at, (came, fetched) in enumerate(zip(drawn.came, drawn.fetched, strict=True)):
            pack(came, top / f"came/{at}.tar", folders=True)
            pack(fetched, top / f"fetched/{at}.tar", folders=True)
        if drawn.planted:
            (top / "home/fetched/outputs/a").symlink_to(PLANTED)
            (top / "home/fetched/naive/a").symlink_to(PLANTED)
        if drawn.came:
            held[number] = drawn.held
        else:
            shutil.rmtree(top)
    subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", JAIL, "sh", jail], check=True, timeout=WAIT_S * 20
    )
    for number, tree in held.items():
        assert without_modes(on_disk(jail / f"{number}/home/fetched/outputs")) == without_modes(tree), number
    assert sum(any((jail / f"{number}/outside").iterdir()) for number in held) > 10


def without_modes(tree: Tree) -> Tree:
    return {name: node._replace(mode=0) for name, node in tree.items()}


def test_checkpoints_that_are_removed_while_a_fetch_copies_the_folder(tmp_path: Path):
    folder, into = tmp_path / "run/checkpoints", tmp_path / "into"
    for step in range(3):
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}/weights").write_text("w")
    (folder / "links").mkdir()
    for at in range(9):
        (folder / f"links/{at}").symlink_to("../step-0/weights")
        (folder / f"{at}.json").write_text("{}")
    removed: list[str] = []

    def rotate(name: str) -> str:
        if name.endswith("/weights"):
            for other in {"step-0", "step-1", "step-2"} - {name.partition("/")[0]}:
                shutil.rmtree(folder / other, ignore_errors=True)
        elif "." in name and not removed:
            removed.extend(path.name for path in folder.glob("*.json") if path.name != name)
            for other in removed:
                (folder / other).unlink()
            (folder / "links/1").unlink()
        return name

    opened(str(folder.parent)).bring("checkpoints", into, rotate)
    files = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    kept = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert len(removed) == 8 and files >= {name for name in kept if "links" not in name}
    with pytest.raises(CloudtrainError):
        folder_writer.copy_tree(tmp_path / "none", tmp_path / "other")


def test_an_absolute_link_to_a_file_of_the_same_folder_comes_as_a_relative_one(tmp_path: Path):
    folder, into = tmp_path / "real/run", tmp_path / "into"
    (folder / "outputs/a/b").mkdir(parents=True)
    (folder / "outputs/a/b/w").write_text("w")
    (tmp_path / "way").symlink_to("real")
    (folder / "outputs/latest").symlink_to(folder / "outputs/a/b")
    (folder / "outputs/a/near").symlink_to(tmp_path / "way/run/outputs/a/b/../b/w")
    (folder / "outputs/a/real").symlink_to(folder / "outputs/a/b/w")
    (folder / "outputs/out").symlink_to(folder / "outputs/../secret")
    (folder / "outputs/beside").symlink_to(f"{folder}/outputs2")
    opened(str(tmp_path / "way/run")).bring("outputs", into)
    found = {path.relative_to(into).as_posix(): str(path.readlink()) for path in into.rglob("*") if path.is_symlink()}
    assert found == {"latest": "a/b", "a/near": "b/w", "a/real": "b/w"}
