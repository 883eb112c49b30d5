"""A bundle: a source directory as one deterministic archive, named by its digest.

    <folder>/<sha256>.tar.gz     the user's files, and under .cloudtrain/ the files that run them
    <folder>/<sha256>.json       its facts: digests, size, files, commit
    <folder>/<sha256>.<commit>.patch   what a tree had changed when it was packaged, JSON (provenance.py)
    <folder>/.cache/             digests of files from earlier runs (digests.py); of each set of files its bundle

The digest is that of the tar before compression, since compressors differ between machines. The same files give the
same digest on any of them, so that unchanged source is neither packed nor uploaded again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from cloudtrain.__about__ import __version__
from cloudtrain.errors import BadSource, StoreError
from cloudtrain.job.homes import explained, new_file, temporary
from cloudtrain.job.units import format_size
from cloudtrain.source import archive, digests, limits, node_code, secrets
from cloudtrain.source.archive import LINK, Entry
from cloudtrain.source.digests import FOLDER, Changed, Member, StatCache, opened, pieces
from cloudtrain.source.files import RESERVED, File, Source, list_files, refusal, shown
from cloudtrain.source.files import why as verdict
from cloudtrain.source.ignore import matches

__all__ = ["Bundle", "File", "list_files", "why"]
# `path` holds what scripts may import, and nothing else: it stands on PYTHONPATH
_FENCE = (f"{RESERVED}/launcher/fence.py", f"{RESERVED}/path/cloudtrain_fence.py")  # the launcher and scripts use it
_TRAINER = tuple(f"{RESERVED}/{name}" for name in ("trainer/", "train.py", "evaluate_model.py", "shipped.py"))
_IN_MEMORY = tuple(  # of the trainer, for a model in memory alone
    f"{RESERVED}/{name}"
    for name in ("shipped.py", "trainer/pickled.py", "trainer/in_memory_", "trainer/data/mapped.py", "trainer/pickles/")
)
_HERE = tuple(f"{RESERVED}/trainer/{name}" for name in ("preview.py", "pickles/array_file.py", "pickles/pickler.py"))
MOST_SCRIPT = 1 << 20  # bytes of a shell script that are looked at
LEVEL = 2  # of ISA-L's 0 to 3: the CPU time of 0 and 1, a little smaller


@dataclass(frozen=True)
class Patch:
    """What a tree changed since its commit; `left_out` says in sentences what of it is not here, and why."""

    text: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bundle:
    """A packaged source; `sha256` names it, `source_sha256` covers the user's files alone."""

    path: Path  # the tar.gz
    sha256: str  # of the tar before compression
    source_sha256: str
    size_bytes: int  # of the tar.gz
    files: tuple[File, ...]  # the user's
    commit: str | None
    dirty: bool
    source: str
    extra: Mapping[str, Path] = field(
        default_factory=dict, compare=False
    )  # known where it was packaged in this process

    @classmethod
    def make(
        cls,
        source: Path | Source,
        into: Path,
        extra: Mapping[str, Path] | None = None,
        /,
        *,
        allow_secrets: Sequence[str] = (),
        allow_large: Sequence[str] = (),
        allow_pointers: Sequence[str] = (),
        must_have: Sequence[str] = (),
        trainer: bool = True,
    ) -> Bundle:
        """Package a directory into a home's folder of bundles, or find the bundle there that already holds the same files.

        `must_have` names files that the job relies on. Patterns, as in .gitignore, name the files that may hold
        credentials (`allow_secrets`), be of any size (`allow_large`) or be Git-LFS pointers (`allow_pointers`).
        Without `trainer` (`JobModel.runs_trainer`) the files of the shared trainer stay here, unless a shell script of
        the source names them; those for a model in memory travel with its folder `shipped` alone. `extra` are further
        files of ours: path in the bundle, file here. Files that are as they were are not read again. Blocking. Raises
        BadSource, with all problems of a kind, and StoreError when the folder cannot be written.
        """
        cache = None
        for _ in range(3):
            source_files = source if isinstance(source, Source) else Source.of(source, into.parent)
            _require(source_files, must_have)
            if sum(file.size for file in source_files.files) > limits.MAX_FILE:
                limits.check(source_files.files, allow_large)
            in_memory = any(file.path.startswith("shipped/") for file in source_files.files)
            ours = [*runtime_files(trainer or _starts_trainer(source_files), in_memory), *(extra or {}).items()]
            members = _members(source_files, ours)
            cache = cache or StatCache(into, source_files.root, secrets.rules())
            try:
                survey = digests.take(members, cache)
                secrets.refuse(survey.findings, allow_secrets, allow_pointers)
                stored = _find_unchanged(into, survey.key, survey.source_sha256)
                sha256, size = (stored.sha256, stored.size_bytes) if stored else _pack(members, survey.digests, into)
            except Changed as change:
                cache.drop(change.path)
                changed = change.path
                continue
            bundle = cls(into / f"{sha256}.tar.gz", sha256, survey.source_sha256, size, source_files.files, source_files.commit,
                         source_files.dirty, str(source_files.root), extra or {})  # fmt: skip
            if stored != bundle:
                bundle._remember()
            elif stored:
                with suppress(OSError):  # a read-only home
                    os.utime(bundle.path)  # `prune --packages` keeps what was used a moment ago
            if not stored:
                with new_file(into / FOLDER / survey.key) as stream:
                    stream.write(sha256.encode())
            cache.save()
            return bundle
        raise BadSource(f"{shown(changed)} changes while cloudtrain packages it", "exclude it in .cloudtrainignore")

    @classmethod
    def stored(cls, into: Path, sha256: str) -> Bundle | None:
        """Return the bundle of that digest, or None when it is not there, or not whole."""
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            return None
        path = into / f"{sha256}.tar.gz"
        try:
            facts = json.loads(path.with_name(f"{sha256}.json").read_bytes())
            files = tuple(File(*file) for file in facts.pop("files"))
            bundle = cls(path=path, sha256=sha256, files=files, **facts)
            return bundle if path.stat().st_size == bundle.size_bytes else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_dict(self) -> dict[str, Any]:
        """Return what a plan says about its bundle."""
        return {
            "sha256": self.sha256,
            "source_sha256": self.source_sha256,
            "size_bytes": self.size_bytes,
            "files": len(self.files),
            "commit": self.commit,
            "dirty": self.dirty,
        }

    @property
    def patch(self) -> Patch:
        """What of a dirty tree's patch is kept."""
        if not (self.commit and self.dirty):
            return Patch()
        try:
            data = json.loads(self.patch_file.read_bytes())
            return Patch(str(data["text"]), tuple(data["left_out"]))
        except (OSError, ValueError, KeyError):
            return Patch("", ("it was not stored when the source was packaged",))

    @property
    def patch_file(self) -> Path:
        return self.path.with_name(f"{self.sha256}.{str(self.commit)[:16]}.patch")

    def origin(self) -> dict[str, Any]:
        """Return what is kept of a run's origin, as JSON: its source, its commit and patch, this machine."""
        system = os.uname()
        about = ("source", "source_sha256", "commit", "dirty")
        return {
            "bundle": self.sha256,
            **{name: getattr(self, name) for name in about},
            **asdict(self.patch),
            "client": {
                "host": system.nodename,
                "system": f"{system.sysname} {system.release} {system.machine}",
                "python": sys.version.split()[0],
                "cloudtrain": __version__,
            },
        }

    def extract(self, into: Path) -> None:
        """Unpack into a folder that is new or empty: it then holds the whole source, or nothing.

        Blocking. Raises StoreError when the archive is damaged, is not of this digest, or holds what no bundle holds.
        """
        temporary = into.with_name(f".{into.name}.{os.getpid()}-{time.perf_counter_ns():x}.tmp")
        digest = hashlib.sha256()
        try:
            with explained(into):
                temporary.mkdir(parents=True)
                with open(self.path, "rb", buffering=0) as stream:
                    archive.extract(stream, temporary, digest.update)
                if digest.hexdigest() != self.sha256:
                    raise StoreError("the archive's content does not match the digest in its name")
                temporary.rename(into)
        except BaseException as error:
            _remove_tree(temporary)
            if isinstance(error, StoreError) and not error.hint:
                raise StoreError(
                    f"{self.path}: {error.message}", "delete it; the next submit creates it again"
                ) from None
            raise

    def _remember(self) -> None:
        facts = {name: getattr(self, name) for name in ("source_sha256", "size_bytes", "files", "commit", "dirty",
                                                        "source")}  # fmt: skip
        with new_file(self.path.with_name(f"{self.sha256}.json")) as stream:
            stream.write(json.dumps(facts, separators=(",", ":")).encode("utf-8", "surrogateescape"))


def why(
    root: Path,
    name: str,
    *,
    allow_secrets: Sequence[str] = (),
    allow_large: Sequence[str] = (),
    allow_pointers: Sequence[str] = (),
) -> str:
    """Return one sentence on why a file (relative to the source) is packaged, left out or refused; raises BadSource."""
    decision = verdict(root, name)
    origin = Path(os.path.abspath(root), decision.path)  # noqa: PTH100
    if not decision.inside or not stat.S_ISREG((at := origin.lstat()).st_mode):
        return decision.sentence
    reasons = []
    if at.st_size > limits.MAX_FILE and not matches(allow_large, decision.path):
        reasons.append(f"it has {format_size(at.st_size)}, and {format_size(limits.MAX_FILE)} are the most")
    try:
        seen = digests.look(Member(Entry(decision.path, at.st_size, 0o644), str(origin), at))
    except (OSError, Changed):
        return f"{decision.sentence}, but it cannot be read"
    for finding in chain(*secrets.refused(seen, allow_secrets, allow_pointers)):
        location = f"line {finding.line}" if finding.line else "by its name"
        reasons.append("it is a Git-LFS pointer" if finding.kind == limits.POINTER else f"{location}: {finding.kind}")
    return decision.sentence + (f", but it is refused: {', '.join(reasons)}" if reasons else "")


def runtime_files(trainer: bool = True, in_memory: bool = True) -> list[tuple[str, Path]]:
    """Return the files that run a job on a node: path in the bundle, file of this installation.

    Args:
        trainer: with those of the shared trainer.
        in_memory: with those by which it trains a model that was in memory.
    """
    folder = node_code.folder()
    files = []
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("tests", "__pycache__")]
        inner = os.path.relpath(at, folder)
        prefix = f"{RESERVED}/" if inner == "." else f"{RESERVED}/{inner}/"
        files += [(prefix + name, Path(at, name)) for name in names if name.endswith(".py")]
    left_out = (*_HERE, *(() if trainer else _TRAINER), *(() if in_memory else _IN_MEMORY))
    files = [file for file in files if not file[0].startswith(left_out)]
    return files + [(_FENCE[1], at) for path, at in files if path == _FENCE[0]]


def _starts_trainer(source: Source) -> bool:
    """Return whether a shell script of the source names a file of the shared trainer."""
    for file in source.files:
        if file.path.endswith((".sh", ".bash")) and file.size <= MOST_SCRIPT and file.mode != LINK:
            with suppress(OSError):  # it is reported where it is packaged
                data = (source.root / file.path).read_bytes()
                if any(name.encode() in data for name in _TRAINER):
                    return True
    return False


def _members(source: Source, ours: Sequence[tuple[str, Path]]) -> list[Member]:
    root = str(source.root)
    members = [
        Member(Entry(*file, source.links.get(file.path, "")), f"{root}/{file.path}", file_stat)
        for file, file_stat in zip(source.files, source.stats, strict=True)
    ]
    for path, file in ours:
        file_stat = file.stat()
        members.append(Member(Entry(path, file_stat.st_size, 0o644), str(file), file_stat))
    return sorted(members, key=lambda member: member.entry.path)


def _require(source: Source, names: Sequence[str]) -> None:
    paths = {file.path for file in source.files}
    problems = []
    for name in names:
        path = os.path.normpath(name)
        if path in paths or path.startswith(f"{RESERVED}/"):
            continue
        if (source.root / path).is_file():
            problems.append(verdict(source.root, path).sentence)
            continue
        from difflib import get_close_matches

        near = get_close_matches(path, sorted(paths), 3, 0.6)
        problems.append(f"{shown(name)} is not there" + (f"; there is {', '.join(map(shown, near))}" if near else ""))
    if problems:
        raise refusal(f"{source.root} lacks files that the job needs", problems)


def _pack(members: Sequence[Member], digests: Sequence[str], into: Path) -> tuple[str, int]:
    """Write the archive, and return its digest and size; raises Changed when a file is not of its digest."""
    from isal import isal_zlib

    whole = hashlib.sha256()
    deflate = isal_zlib.compressobj(LEVEL, wbits=31)
    with temporary(into, "bundle") as (stream, path):

        def write(piece: bytes) -> None:
            whole.update(piece)
            stream.write(deflate.compress(piece))

        for member, digest in zip(members, digests, strict=True):
            entry = member.entry
            write(archive.header(entry))
            if entry.mode == LINK:
                continue
            own = hashlib.sha256()
            with opened(member) as fd:
                for piece in pieces(fd, entry):
                    own.update(piece)
                    write(piece)
            write(archive.padding(entry.size))
            if own.hexdigest() != digest:
                raise Changed(entry.path)
        write(archive.END)
        stream.write(deflate.flush())
        size = stream.tell()
        stream.close()
        path.replace(into / f"{whole.hexdigest()}.tar.gz")
        return whole.hexdigest(), size


def _find_unchanged(into: Path, key: str, source_sha256: str) -> Bundle | None:
    """Return the stored bundle of the same source files, or None."""
    try:
        made = Bundle.stored(into, (into / FOLDER / key).read_text("ascii"))
    except (OSError, ValueError):
        return None
    return made if made and made.source_sha256 == source_sha256 else None


def _remove_tree(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
