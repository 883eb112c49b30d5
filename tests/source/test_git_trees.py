"""Law 4 on random trees: what is packaged is what real git lists, whatever the tree has been through.

A tree is grown step by step: ignore files at any depth with negation and anchors, submodules, repositories that are
none, sparse checkouts, dirty and staged and deleted files, line ends by autocrlf, execute bits, odd names, links inside
and out, pipes. The reference is built here from `git ls-files` and the files themselves, and shares no code with
cloudtrain.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudtrain.errors import BadSource
from cloudtrain.source.bundle import Bundle
from tests.source.trees import git, repository, write

FOLDERS = ["", "a", "a/b", "a/b/c", "build", "sp ace", "späße", "a/build", "-dash"]
NAMES = [
    "x.py",
    "y.log",
    "z",
    "README",
    "data.csv",
    "new\nline",
    'quo"te',
    "back\\slash",
    "日本",
    " lead",
    "*",
    "[a]",
    "#no",
    "!not",
]
LINES = [
    "*.log", "!y.log", "/a", "a/", "/a/", "b", "**/c", "a/**", "!a/", "!a/b/", "*", "!*/", "!*.py", "build/", "/build", "build/*",
    "!build/x.py",
    "a/*/c", "?", "[xy]*", "[!x]*", "\\#no", "\\!not", "sp ace/", "*.csv ", "data.*", "!data.csv", "späße", "**",
    "a/b/x.py",
    "# comment", "", "!", "/", "x.py/", "*/z", "\\*", "\\[a\\]", "日*", "-dash", "a//b", "../x", "a/**/z",
]  # fmt: skip


class Garden:
    """One tree under a seed: `grow` changes it, `expected` is what git says about it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.dice = random.Random(seed)
        self.inner = root.parent / "inner"
        self.is_sparse = False
        repository(root, {"always.txt": "1\n"})

    def grow(self, steps: int) -> None:
        deeds: list[Callable[[], object]] = [
            *[self.file] * 6, *[self.ignore] * 3, self.execute, self.link, self.commit, self.stage, self.delete, self.unstage,
            self.submodule, self.sparse, self.autocrlf, self.folder_becomes_a_file, self.force,
            self.exclude, self.ours, self.clean,
        ]  # fmt: skip
        for _ in range(steps):
            self.dice.choice(deeds)()

    # -- deeds --------------------------------------------------------------------------------------------------------

    def place(self) -> str:
        folder = self.dice.choice(FOLDERS)
        return f"{folder}/{self.dice.choice(NAMES)}" if folder else self.dice.choice(NAMES)

    def put(self, path: str, data: bytes) -> None:
        at = self.root / path
        if not at.is_symlink() and not at.is_dir() and not any(up.is_file() or up.is_symlink() for up in at.parents):
            write(self.root, {path: data})

    def file(self) -> None:
        self.put(self.place(), self.dice.randbytes(self.dice.randrange(40)) + b"\nline\n")

    def ignore(self) -> None:
        folder = self.dice.choice([*FOLDERS, ""])
        lines = self.dice.choices(LINES, k=self.dice.randint(1, 5))
        self.put(f"{folder}/.gitignore" if folder else ".gitignore", "\n".join(lines).encode())

    def exclude(self) -> None:
        (self.root / ".git/info/exclude").write_text(self.dice.choice(LINES) + "\n")

    def some(self) -> Path | None:
        files = [
            path
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and ".git" not in path.relative_to(self.root).parts
        ]
        return self.dice.choice(files) if files else None

    def execute(self) -> None:
        if (path := self.some()) and not path.is_symlink():
            path.chmod(self.dice.choice([0o755, 0o644, 0o600, 0o711, 0o654]))

    def link(self) -> None:
        at = self.root / self.dice.choice(["l1", "a/l2", "build/l3"])
        if os.path.lexists(at) or any(up.is_symlink() or up.is_file() for up in at.parents):
            return
        at.parent.mkdir(exist_ok=True, parents=True)
        at.symlink_to(self.dice.choice(["always.txt", "x.py", "nowhere", ".", "b"]))

    def commit(self) -> None:
        self.stage()
        git(self.root, "commit", "-q", "--allow-empty", "-m", "work")

    def stage(self) -> None:
        git(self.root, "add", "-A", "--sparse")

    def unstage(self) -> None:
        if path := self.some():
            git(
                self.root,
                "rm",
                "-q",
                "-r",
                "-f",
                "--cached",
                "--ignore-unmatch",
                "--",
                f":(literal){path.relative_to(self.root)}",
            )

    def force(self) -> None:
        if (path := self.some()) and not any(up.is_symlink() for up in path.parents) and not self.in_submodule(path):
            git(self.root, "add", "-f", "--sparse", "--", f":(literal){path.relative_to(self.root)}")

    def in_submodule(self, path: Path) -> bool:
        return any((up / ".git").exists() for up in path.parents if up != self.root and self.root in up.parents)

    def delete(self) -> None:
        if (path := self.some()) and path.name != "always.txt":
            path.unlink()

    def clean(self) -> None:
        folder = self.root / self.dice.choice(["a/b", "build"])
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)

    def folder_becomes_a_file(self) -> None:
        self.clean()
        self.put(self.dice.choice(["a/b", "build"]), b"now a file\n")

    def submodule(self) -> None:
        at = self.root / self.dice.choice(["vendor", "a/lib"])
        if self.is_sparse or os.path.lexists(at) or any(up.is_symlink() or up.is_file() for up in at.parents):
            return
        if not self.inner.exists():
            repository(self.inner, {"lib.py": "1\n", ".gitignore": "*.log\n", "sub/deep.py": "2\n"})
        relative = str(at.relative_to(self.root))
        # `submodule add` refuses where .gitmodules was deleted, or differs from what is staged
        if (self.root / ".gitmodules").exists():
            git(self.root, "add", "-f", "--", ".gitmodules")
        elif git(self.root, "ls-files", "--", ".gitmodules") + git(self.root, "ls-tree", "HEAD", "--", ".gitmodules"):
            return
        git(
            self.root,
            "submodule",
            "add",
            "-q",
            "--force",
            "--name",
            f"m{self.dice.random()}",
            str(self.inner),
            relative,
        )
        write(at, {"new.py": "3\n", "y.log": "ignored\n"})

    def sparse(self) -> None:
        self.is_sparse = True
        self.commit()
        git(self.root, "sparse-checkout", "set", "--no-cone", "/*", self.dice.choice(["!/a", "!*.csv", "!/build/x.py"]))

    def autocrlf(self) -> None:
        git(self.root, "config", "core.autocrlf", self.dice.choice(["true", "input", "false"]))
        self.put(".gitattributes", self.dice.choice([b"*.py text eol=crlf\n", b"* -text\n"]))

    def ours(self) -> None:
        """Leave something out, or take it in: plain names, whose meaning this test can state by itself."""
        self.put(".cloudtrainignore", self.dice.choice([b"README\n", b"!/z\nREADME\n", b"# nothing\n"]))

    # -- the reference ------------------------------------------------------------------------------------------------

    def expected(self) -> dict[str, tuple[int, bytes]]:
        """Return mode and content by path, as git and the file system have them."""
        paths = set(self.listed(self.root))
        rules = self.root / ".cloudtrainignore"
        lines = rules.read_text().splitlines() if rules.is_file() else []
        if "README" in lines:
            paths = {path for path in paths if "README" not in path.split("/")}
        if "!/z" in lines:
            paths.add("z")
        found = {}
        for path in paths:
            at = self.root / path
            if any(up.is_symlink() for up in at.parents if self.root in up.parents) or not os.path.lexists(at):
                continue
            mode = at.lstat().st_mode
            if stat.S_ISLNK(mode):
                found[path] = 0o120000, os.readlink(at).encode()
            elif stat.S_ISREG(mode):
                found[path] = 0o755 if mode & 0o100 else 0o644, at.read_bytes()
        return found

    def listed(self, root: Path) -> list[str]:
        paths = [path for path in git(root, "ls-files", "-co", "--exclude-standard", "-z").split("\0") if path]
        for path in list(paths):
            if not (root / path).is_symlink() and (root / path / ".git").exists():
                paths.remove(path)
                paths += [f"{path}/{inner}" for inner in self.listed(root / path)]
        return paths


def unpacked(root: Path) -> dict[str, tuple[int, bytes]]:
    found = {}
    for folder, folders, names in os.walk(root):
        for name in [*names, *(one for one in folders if os.path.islink(os.path.join(folder, one)))]:
            at = Path(folder, name)
            path = str(at.relative_to(root))
            if not path.startswith(".cloudtrain/"):
                link = at.is_symlink()
                content = os.readlink(at).encode() if link else at.read_bytes()
                found[path] = 0o120000 if link else stat.S_IMODE(at.lstat().st_mode), content
    return found


def holds(folder: Path, seed: int, rounds: int) -> None:
    """Grow a tree, package it, grow it on: each time the bundle is what git lists, with the stat cache and without."""
    garden = Garden(folder / "source", seed)
    for number in range(rounds):
        garden.grow(garden.dice.randint(1, 14))
        wanted = garden.expected()
        if not wanted:
            with pytest.raises(BadSource, match="git ignores every file"):
                Bundle.make(garden.root, folder / "bundles")
            continue
        made = Bundle.make(garden.root, folder / "bundles")
        assert {file.path: file.mode for file in made.files} == {path: mode for path, (mode, _) in wanted.items()}
        made.extract(folder / f"out-{number}")
        assert unpacked(folder / f"out-{number}") == wanted
        assert Bundle.make(garden.root, folder / f"fresh-{number}").sha256 == made.sha256
        status = git(garden.root, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none")
        new = set(wanted) - set(garden.listed(garden.root)) or any(
            path in wanted for path in git(garden.root, "ls-files", "-o", "--exclude-standard", "-z").split("\0")
        )
        if status:
            assert made.dirty
        elif new and not made.dirty:
            raise AssertionError("new files count as dirty")


SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=12, **SETTINGS)
@given(seed=st.integers(0, 2**32))
def test_the_bundle_of_a_random_tree_is_what_git_lists(seed):
    with tempfile.TemporaryDirectory() as folder:
        holds(Path(folder), seed, 2)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=1500, **SETTINGS)
@given(seed=st.integers(0, 2**32))
def test_the_bundle_of_many_random_trees_is_what_git_lists(seed):
    with tempfile.TemporaryDirectory() as folder:
        holds(Path(folder), seed, 4)


# -- what is refused on any tree --------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "link out": (lambda at: at.symlink_to("../" * 9 + "etc"), "is a link that points outside the source"),
    "absolute link": (lambda at: at.symlink_to("/etc/hostname"), "is a link that points outside the source"),
    "pipe": (os.mkfifo, "is a named pipe"),
    "repository": (lambda at: repository(at, {"x": "1"}), "is a separate git repository"),
    "credentials": (lambda at: at.write_text("npm_" + "aB3" * 12), "credentials"),
    "pointer": (
        lambda at: at.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 1\n"),
        "LFS",
    ),
}


def refused(folder: Path, seed: int, kind: str) -> None:
    """Put one bad thing into a random tree: it is refused by name, unless it is ignored."""
    garden = Garden(folder / "source", seed)
    garden.grow(8)
    at = garden.root / garden.dice.choice(["bad thing", "bad/deep/thing", "zz.bad"])
    if any(up.is_file() for up in at.parents):
        return
    at.parent.mkdir(parents=True, exist_ok=True)
    make, text = BAD[kind]
    make(at)
    name = str(at.relative_to(garden.root))
    # git never names a pipe; only one that it tracks is known to be there
    if kind == "pipe":
        at.unlink()
        write(garden.root, {name: "1"})
        git(garden.root, "add", "-f", "--sparse", "--", name)
        at.unlink()
        make(at)
    ignored = kind != "pipe" and name not in git(garden.root, "ls-files", "-co", "--exclude-standard", "-z").replace(
        "/\0", "\0"
    ).split("\0")
    if ignored:
        assert not garden.expected() or Bundle.make(garden.root, folder / "bundles")
        return
    with pytest.raises(BadSource) as caught:
        Bundle.make(garden.root, folder / "bundles")
    assert text in str(caught.value) and (name in str(caught.value) or repr(name) in str(caught.value))


@pytest.mark.parametrize("kind", BAD)
@settings(max_examples=2, **SETTINGS)
@given(seed=st.integers(0, 2**32))
def test_a_bad_thing_in_a_random_tree_is_refused_by_name(kind, seed):
    with tempfile.TemporaryDirectory() as folder:
        refused(Path(folder), seed, kind)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", BAD)
@settings(max_examples=150, **SETTINGS)
@given(seed=st.integers(0, 2**32))
def test_bad_things_in_many_random_trees_are_refused_by_name(kind, seed):
    with tempfile.TemporaryDirectory() as folder:
        refused(Path(folder), seed, kind)
