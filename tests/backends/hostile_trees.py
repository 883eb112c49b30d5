"""Drawn trees of a stranger, how each kind of fetch sees them, and what a folder holds after several fetches."""

from __future__ import annotations

import io
import itertools
import os
import random
import stat
import tarfile
from pathlib import Path
from typing import NamedTuple

NAMES = ("a", "b", "c", "d", "A", "new\nline", "späße", ".hidden", "x")
MTIME_NS = 1_600_000_000_000_000_000
_TICKS = itertools.count(MTIME_NS, 1_000_000)  # no file has another one's time: those with size and time are skipped


class Node(NamedTuple):
    """A file, folder, link, or what nobody may write: hard (a hard link), fifo, device."""

    kind: str
    data: str = ""  # of a file; target of a link
    mode: int = 0o644


Tree = dict[str, Node]


def parents(name: str) -> list[str]:
    return [name[:at] for at, letter in enumerate(name) if letter == "/"]


def draw(random_: random.Random, names: tuple[str, ...] = NAMES) -> Tree:
    """Draw a tree as a file system can hold it: no name is a file and a folder at once."""
    tree: Tree = {}
    few = random_.sample(names, 4)  # so that fetches meet each other's names
    for _ in range(random_.randint(1, 8)):
        name = "/".join(random_.choice(few) for _ in range(random_.randint(1, 3)))
        if any(tree.get(at, Node("folder")).kind != "folder" for at in parents(name)):
            continue
        if any(other.startswith(f"{name}/") for other in tree):
            continue
        kind = random_.choice(("file", "file", "link", "link", "link", "folder", "fifo"))
        if kind == "link":
            parts = random_.choices(("..", *few), k=random_.randint(1, 5))
            target = random_.choice(("/", "", "", "", "", "")) + "/".join(parts)
            tree[name] = Node("link", random_.choice((target, target, target, "../../outside", f"{'../' * 9}etc")))
        else:
            data = str(random_.randint(0, 99)) if kind == "file" else ""
            tree[name] = Node(kind, data, random_.choice((0o644, 0o755, 0o600, 0o444, 0o4755, 0o2777, 0o666)))
    return tree


def build(tree: Tree, top: Path) -> None:
    """Make a tree on the disk, as the output of a run is."""
    top.mkdir(parents=True)
    for name, node in tree.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if node.kind == "folder":
            path.mkdir(exist_ok=True)
        elif node.kind == "link":
            path.symlink_to(node.data)
        elif node.kind == "fifo":
            os.mkfifo(path)
        else:
            path.write_text(node.data)
            path.chmod(node.mode)
            os.utime(path, ns=(MTIME_NS, next(_TICKS)))


def pack(tree: Tree, path: Path, *, folders: bool = False) -> None:
    """Write a tree as a tar.gz; with `folders` as a tar that names every folder in it, links last."""
    order = sorted(tree, key=lambda name: tree[name].kind == "link") if folders else list(tree)
    kinds = {"file": tarfile.REGTYPE, "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "fifo": tarfile.FIFOTYPE,
             "device": tarfile.CHRTYPE, "hard": tarfile.LNKTYPE}  # fmt: skip
    named = set()
    with tarfile.open(path, "w") if folders else tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name in order:
            for folder in [*parents(name)] if folders else []:
                if folder not in named:
                    named.add(folder)
                    archive.addfile(_member(folder, Node("folder", mode=0o755), tarfile.DIRTYPE))
            node = tree[name]
            named.add(name)
            archive.addfile(_member(name, node, kinds[node.kind]), io.BytesIO(node.data.encode()))


def _member(name: str, node: Node, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = kind, node.mode, 1_600_000_000
    member.linkname = node.data if node.kind in ("link", "hard") else ""
    member.size = len(node.data.encode()) if node.kind == "file" else 0
    return member


class Conflict(Exception):
    """A file or link cannot replace a folder that is not empty."""


class Folder:
    """What a folder holds after fetches, by the rules of the page."""

    def __init__(self) -> None:
        self.nodes: Tree = {}

    def receive(self, tree: Tree) -> Tree:
        """Add what a fetch brings, and return that part of the tree which may come."""
        comes = {name: node for name, node in tree.items() if node.kind in ("file", "folder")}
        for name, node in comes.items():
            self._put(name, node)
        for name, node in tree.items():
            if node.kind == "link" and _is_simple(name, node.data):
                for folder in parents(name):
                    self._put(folder, Node("folder"))
                if not self._leads_out(name, node.data):
                    self._put(name, node)
                    comes[name] = node
        return comes

    def receive_whole(self, tree: Tree) -> bool:
        """Add all of a tree to an empty folder; returns whether all of it may come."""
        for name, node in tree.items():
            self._put(name, node)
        links = {name: node.data for name, node in tree.items() if node.kind == "link"}
        refused = any(target.startswith("/") or self._leads_out(name, target) for name, target in links.items())
        return not refused and all(node.kind != "fifo" for node in tree.values())

    def _put(self, name: str, node: Node) -> None:
        for folder in parents(name):
            if self.nodes.get(folder, Node("")).kind != "folder":
                self.nodes[folder] = Node("folder")
        old = self.nodes.get(name, Node(""))
        if node.kind == "folder" and old.kind == "folder":
            return
        if any(other.startswith(f"{name}/") for other in self.nodes):
            raise Conflict(name)
        self.nodes[name] = node

    def _leads_out(self, name: str, target: str) -> bool:
        at, todo, hops = name.split("/")[:-1], target.split("/")[::-1], 0
        while todo and hops < 50:
            part = todo.pop()
            if part == "..":
                if not at:
                    return True
                at.pop()
            elif part not in ("", "."):
                at.append(part)
                node = self.nodes.get("/".join(at), Node(""))
                if node.kind == "link":
                    if node.data.startswith("/"):
                        return True
                    at.pop()
                    todo += node.data.split("/")[::-1]
                    hops += 1
        return False

    def read(self) -> Tree:
        """Return the nodes as `on_disk` reads them."""
        return {
            name: node._replace(mode=node.mode & 0o775 | 0o400) if node.kind == "file" else Node(node.kind, node.data)
            for name, node in self.nodes.items()
        }


def _is_simple(name: str, target: str) -> bool:
    """Say whether a target goes up first, no further than to the top, and then only down."""
    ups = target.split("/")
    down = [part for part in ups if part != ".."]
    up = ups[: len(ups) - len(down)]
    return target[:1] != "/" and [*up, *down] == ups and len(up) <= name.count("/")


def on_disk(top: Path) -> Tree:
    """Read a folder, following no links."""
    found: Tree = {}
    for at, folders, names in os.walk(top):
        for base in (*folders, *names):
            path = Path(at, base)
            name, about = path.relative_to(top).as_posix(), path.lstat()
            if stat.S_ISLNK(about.st_mode):
                found[name] = Node("link", str(path.readlink()))
            elif stat.S_ISDIR(about.st_mode):
                found[name] = Node("folder")
            else:
                found[name] = Node("file", path.read_text(), stat.S_IMODE(about.st_mode))
    return {name: node if node.kind == "file" else Node(node.kind, node.data) for name, node in found.items()}


def census(top: Path, but: Path) -> dict[str, tuple[object, ...]]:
    """Return all that is known of what lies below a folder, but for one folder in it."""
    found: dict[str, tuple[object, ...]] = {}
    for at, folders, names in os.walk(top):
        folders[:] = [name for name in folders if Path(at, name) != but]
        for path in (Path(at), *(Path(at, name) for name in names)):
            about = path.lstat()
            data = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
            changed = about.st_mtime_ns if path != but.parent else 0  # an archive is there while it is unpacked
            found[str(path)] = (about.st_mode, changed, about.st_size, about.st_nlink, about.st_ino, data)
    return found
