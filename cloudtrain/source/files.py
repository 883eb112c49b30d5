"""Which files of a source directory are the user's source: git's list, minus what `.cloudtrainignore` rules out.

In a git repository these are the files that `git ls-files -co --exclude-standard` names and that exist; elsewhere all
files except those that `.gitignore` files and a few customs (`__pycache__`, virtual environments) leave out.
`.cloudtrainignore` is written like `.gitignore` and may stand in any folder; the last line that matches a file decides,
and one that begins with `!` includes a file again although git, or the rule of a folder, leaves it out. Only names,
sizes and modes are read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cloudtrain.errors import BadSource
from cloudtrain.job import homes
from cloudtrain.source import git
from cloudtrain.source.archive import LINK, leads_out
from cloudtrain.source.ignore import Rules

IGNORE_FILE = ".cloudtrainignore"
RESERVED = ".cloudtrain"  # the folder of our own files in a bundle
SHOWN = 20  # problems in one message
# Left out by default, outside of git only: git's list is taken as it is. By name and ending, so that a source
# without ignore files does not import pathspec.
_FOLDERS = {"__pycache__", ".venv", "venv", ".tox", ".nox", "node_modules", ".ipynb_checkpoints", ".pytest_cache",
            ".mypy_cache", ".ruff_cache", ".hg", ".svn"}  # fmt: skip
_ENDINGS = (".pyc", ".pyo")
_NAMES = {".DS_Store"}
# Left out in git too, unless it tracks them: reports, results and records of attempts (.index), named after a run.
_RUN = re.compile(r".+-(\d{6}-\d{6}-[a-z0-9]{4}|k[0-9a-f]{16})(\.html|\.a\d+\..+)?")
_RUN_RULE = f"it is named as a run's report or results; a line !NAME in {IGNORE_FILE} includes it"


class File(NamedTuple):
    """One file of the source: its path from the root, bytes, and 0o644, 0o755 or 0o120000 (a symbolic link)."""

    path: str
    size: int
    mode: int


_HOME_RULE = "cloudtrain's own home (CLOUDTRAIN_HOME) is never packaged"


@dataclass(frozen=True)
class Source:
    """A directory's files, sorted by the bytes of their paths, and the commit that they belong to."""

    root: Path
    files: tuple[File, ...]
    links: Mapping[str, str]  # path -> target
    commit: str | None
    dirty: bool  # some file is not as in the commit
    stats: Sequence[os.stat_result]  # how each file was, in the order of `files`

    @classmethod
    def of(cls, root: Path, home: Path | None = None) -> Source:
        """Return the source at a directory, without a `home` below it; raises BadSource with every problem found."""
        root = _directory(root)
        in_git = _is_in_git(root)
        query = git.HeadQuery(root) if in_git else None
        try:
            chosen = _Choice.of(root, in_git, home)
            files, links, stats = chosen.check()
            head = query.answer() if query and chosen.from_git else git.Head(None, False)
        finally:
            if query:
                query.close()
        dirty = head.dirty or (chosen.from_git and any(not chosen.tracked[file.path] for file in files))
        return cls(root, tuple(files), links, head.commit, dirty, stats)

    @classmethod
    def whole(cls, root: Path, commit: str | None, dirty: bool) -> Source:
        """Return every file below a directory, which were a source before; raises BadSource."""
        found = {
            path.relative_to(root).as_posix(): False for path in root.rglob("*") if path.is_symlink() or path.is_file()
        }
        files, links, stats = _Choice(root, Rules(root, IGNORE_FILE), False, found).check()
        return cls(root, tuple(files), links, commit, dirty, stats)


def list_files(root: Path) -> tuple[File, ...]:
    """Return the files that a bundle of this directory holds; raises BadSource."""
    return Source.of(root).files


class Verdict(NamedTuple):
    """Whether a file is in the source, and one sentence on why."""

    path: str
    inside: bool
    sentence: str


def why(root: Path, name: str) -> Verdict:
    """Return why a file (relative to the source) is packaged or not; raises BadSource."""
    root = _directory(root)
    path = os.path.normpath(os.path.relpath(name, root) if name.startswith("/") else name)
    if path.startswith("../") or path == "..":
        return Verdict(path, False, f"{name} is not packaged: it is not below {root}")
    if not os.path.lexists(root / path):
        return Verdict(path, False, f"{path} is not packaged: it does not exist")
    chosen = _Choice.of(root, _is_in_git(root))
    if path in chosen.tracked:
        if line := chosen.rules.line(path):
            return Verdict(path, True, f"{path} is packaged: {line} includes it")
        if not chosen.from_git:
            return Verdict(path, True, f"{path} is packaged: no rule excludes it")
        reason = "git tracks it" if chosen.tracked[path] else "it is new, and no rule ignores it"
        return Verdict(path, True, f"{path} is packaged: {reason}")
    if path in chosen.left_out:
        return Verdict(path, False, f"{path} is not packaged: {chosen.left_out[path]}")
    for folder in (path, *map(str, Path(path).parents)):
        if folder in chosen.nested:
            return Verdict(path, False, f"{path} is not packaged: {folder} is a repository of its own")
    if (root / path).is_dir() and not (root / path).is_symlink():
        return Verdict(path, False, f"{path} is not packaged: it is a folder; only files are packaged")
    if chosen.is_home(path):
        return Verdict(path, False, f"{path} is not packaged: {_HOME_RULE}")
    if line := chosen.rules.line(path):
        return Verdict(path, False, f"{path} is not packaged: {line} excludes it")
    reason = chosen.explain(path) or "it is not a regular file, or git does not look there"
    return Verdict(path, False, f"{path} is not packaged: {reason}")


@dataclass
class _Choice:
    """The names that were chosen, before anything is known about the files themselves."""

    root: Path
    rules: Rules  # of .cloudtrainignore
    from_git: bool
    tracked: dict[str, bool] = field(default_factory=dict)  # chosen path -> whether git tracks it
    left_out: dict[str, str] = field(default_factory=dict)  # path -> why; in git reports only
    nested: list[str] = field(default_factory=list)
    absent_submodules: list[str] = field(default_factory=list)
    homes: tuple[str, ...] = ()  # below the root: what cloudtrain writes, such as the packages made before

    @classmethod
    def of(cls, root: Path, in_git: bool, home: Path | None = None) -> _Choice:
        rules = Rules(root, IGNORE_FILE)
        rules.read("")
        listing = git.listing(root) if in_git else None
        real = os.path.realpath(root) + os.sep
        known = {os.path.realpath(each) for each in (homes.home(), home) if each}
        below = tuple(each[len(real) :] for each in known if each.startswith(real))
        chosen = cls(root, rules, listing is not None, homes=below)
        if listing is None:
            chosen._walk()
        else:
            chosen._take(listing)
        return chosen

    def is_home(self, path: str) -> bool:
        """Return whether a path is cloudtrain's own home, or lies in it."""
        return any(path == home or path.startswith(home + "/") for home in self.homes)

    def _take(self, listing: git.Listing) -> None:
        tracked_paths = {**dict.fromkeys(listing.tracked, True), **dict.fromkeys(listing.untracked, False)}
        tracked_paths = {path: tracked for path, tracked in tracked_paths.items() if not self.is_home(path)}
        for path in tracked_paths:
            if path.endswith("/" + IGNORE_FILE):
                self.rules.read(path[: -len(IGNORE_FILE) - 1])
        again: Iterable[str] = git.ignored(self.root, listing.submodules) if self.rules.reincludes else ()
        if self.rules:
            tracked_paths = {path: tracked for path, tracked in tracked_paths.items() if not self.rules.excludes(path)}
            again = [path for path in again if self.rules.excludes(path) is False and not self.is_home(path)]
        nested = [path for path in listing.nested if not self.is_home(path)]
        self.nested = [path for path in nested if not self.rules.excludes(path + "/")]
        self.nested += [path.rstrip("/") for path in again if path.endswith("/")]
        self.absent_submodules = [path for path in listing.absent_submodules if not self.rules.excludes(path + "/")]
        for path in [path for path, tracked in tracked_paths.items() if not tracked and is_of_run(path)]:
            if self.rules.excludes(path) is not False:
                del tracked_paths[path]
                self.left_out[path] = _RUN_RULE
        self.tracked = {**tracked_paths, **dict.fromkeys((path for path in again if not path.endswith("/")), False)}

    def _walk(self) -> None:
        git_rules = Rules(self.root, ".gitignore", like_git=True)
        pending = [("", "")]  # folder, why it is out
        while pending:
            folder, out = pending.pop()
            if folder:
                self.rules.read(folder)
            if not out:
                git_rules.read(folder)
            for entry in _scan(self.root, folder):
                name = os.fsencode(entry.name).decode("utf-8", "surrogateescape")
                path = f"{folder}/{name}" if folder else name
                if name == ".git" or self.is_home(path):
                    continue
                inside = entry.is_dir(follow_symlinks=False)
                asked = path + "/" if inside else path
                ours, reason = self.rules.excludes(asked), out
                if not reason and (ignored := git_rules.excludes(asked)):
                    reason = f"{git_rules.line(asked)} excludes it"
                if not reason and ignored is None and is_of_run(name):
                    reason = _RUN_RULE
                if not reason and ignored is None and _is_custom(entry, inside):
                    reason = (
                        f"{name} is never packaged outside of git, unless a line with ! in {IGNORE_FILE} includes it"
                    )
                if inside and (entry_is_repository := os.path.lexists(f"{entry.path}/.git")) and not (ours or reason):
                    self.nested.append(path)
                if inside and not (entry_is_repository or ((ours or reason) and not self.rules.reincludes)):
                    pending.append((path, reason))
                elif inside or (ours is None and reason):
                    self.left_out[path] = reason or f"{self.rules.line(asked)} excludes it"
                elif not ours:
                    self.tracked[path] = False

    def explain(self, path: str) -> str:
        """Return why git, or the walk, left a path out."""
        if self.from_git:
            line = git.rule(self.root, path)
            return f"git ignores it ({line})" if line else ""
        return next((self.left_out[str(up)] for up in Path(path).parents if str(up) in self.left_out), "")

    def check(self) -> tuple[list[File], dict[str, str], list[os.stat_result]]:
        """Return the files that exist, sorted, the links among them, and how each was; raises BadSource."""
        problems = [f"{shown(path)} is a separate git repository; make it a submodule, or exclude it in {IGNORE_FILE}"
                    for path in self.nested]  # fmt: skip
        problems += [f"{shown(path)} is a submodule that is not checked out; git submodule update --init fetches it"
                     for path in self.absent_submodules]  # fmt: skip
        files: list[File] = []
        stats: list[os.stat_result] = []
        links: dict[str, str] = {}
        folders = _Folders(self.root)
        for path in sorted(self.tracked):
            try:
                file_stat = folders.lstat(path)
                if file_stat is None or stat.S_ISDIR(file_stat.st_mode):  # a folder in its place: the file is gone
                    continue
                path.encode()
                if path == RESERVED or path.startswith(RESERVED + "/"):
                    problems.append(f"{shown(path)} has a name that is reserved for cloudtrain's own files; rename it")
                elif stat.S_ISREG(file_stat.st_mode):
                    files.append(File(path, file_stat.st_size, 0o755 if file_stat.st_mode & stat.S_IXUSR else 0o644))
                elif stat.S_ISLNK(file_stat.st_mode):
                    links[path] = os.readlink(_fs(self.root, path)).decode()  # noqa: PTH115
                    files.append(File(path, len(links[path].encode()), LINK))
                else:
                    kind = _kind(file_stat.st_mode)
                    problems.append(f"{shown(path)} is a {kind}; remove it, or exclude it in {IGNORE_FILE}")
                if len(files) > len(stats):
                    stats.append(file_stat)
            except UnicodeError:
                problems.append(f"{shown(path)} has a name or link target that is not UTF-8")
            except OSError as error:
                problems.append(f"{shown(path)} cannot be examined: {error.strerror}")
        outward = [path for path in links if leads_out(path, links)]
        problems += [
            f"{shown(path)} is a link that points outside the source, to {shown(links[path])}" for path in outward
        ]
        if problems:
            raise refusal(
                f"{self.root} cannot be packaged", problems, _instead_of_link(outward[0], links) if outward else ""
            )
        if not files:
            text = "git ignores every file in it" if self.from_git and any(self.root.iterdir()) else "it has no files"
            raise BadSource(
                f"{self.root} cannot be packaged: {text}", f"add a line !NAME to {IGNORE_FILE} includes a file again"
            )
        return files, links, stats


class _Folders:
    """Examines paths without following a link on the way: what lies behind one is not part of the tree."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._real = {"": True}

    def lstat(self, path: str) -> os.stat_result | None:
        """Return what is at a path, or None when nothing is."""
        if not self._is_real(path.rpartition("/")[0]):
            return None
        try:
            return os.lstat(_fs(self._root, path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _is_real(self, folder: str) -> bool:
        if folder not in self._real:
            folder_stat = self.lstat(folder)
            self._real[folder] = folder_stat is not None and stat.S_ISDIR(folder_stat.st_mode)
        return self._real[folder]


def _instead_of_link(path: str, links: Mapping[str, str]) -> str:
    """Return what to write instead of a link that leads out of the source."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).stem).strip("-_") or "data"
    return (
        f"add inputs: {{{name}: {links[path]}}} to the job to upload what it points to, and {{input:{name}}} in the arguments; "
        f"or exclude the link with a line {path} in {IGNORE_FILE}"
    )


def refusal(head: str, problems: Sequence[str], hint: str = "", limit: int | None = SHOWN) -> BadSource:
    """Return the error that names every problem, or as many as the limit says."""
    more = [f"and {len(problems) - limit} more"] if limit and len(problems) > limit else []
    return BadSource("\n  ".join([f"{head}:", *problems[:limit], *more]), hint)


def shown(path: str) -> str:
    """Return a path as it may stand in a message: quoted when it holds anything unusual."""
    plain = path.isprintable() and path.strip() == path and not {"'", '"', "\\"} & set(path)
    return path if plain and path else ascii(path)


def _directory(root: Path) -> Path:
    root = Path(os.path.abspath(root))  # noqa: PTH100  # not resolve(): git, and messages, shall see the name given
    if not root.is_dir():
        raise BadSource(f"the source {root} " + ("is not a directory" if root.exists() else "does not exist"),
                        "source: must be the directory to package")  # fmt: skip
    return root


def _is_in_git(root: Path) -> bool:
    """Return whether a directory, or one above it, has a `.git`: without one git need not be asked, nor installed."""
    return any(os.path.lexists(folder / ".git") for folder in (root, *root.parents))


def _scan(root: Path, folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(root / folder if folder else root) as entries:
            yield from entries
    except OSError as error:
        raise BadSource(f"{root / folder} cannot be read: {error.strerror}", f"name it in {IGNORE_FILE}") from None


def is_of_run(path: str) -> bool:
    """Return whether a file, or a folder above it, is named after a run, as reports and results are."""
    return any(_RUN.fullmatch(name) for name in path.split("/"))


def _is_custom(entry: os.DirEntry[str], folder: bool) -> bool:
    """Return whether an entry is left out by default; a virtual environment of any name is."""
    if entry.name in _NAMES or entry.name.endswith(_ENDINGS):
        return True
    return folder and (entry.name in _FOLDERS or os.path.lexists(f"{entry.path}/pyvenv.cfg"))


def _fs(root: Path, path: str) -> bytes:
    return os.fsencode(root) + b"/" + path.encode("utf-8", "surrogateescape")


def _kind(mode: int) -> str:
    for test, name in ((stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket")):
        if test(mode):
            return name
    return "device"
