"""Which files of a working directory can be a script's results, and which folders are checkpoints that are whole.

Standard library only. The folders of the Trainer, Accelerate, Lightning, DeepSpeed and torch.distributed.checkpoint are
known by the file that each writes last; any other folder that is named as a checkpoint counts when it rests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence

from .. import credentials
from ..masks import Masks

OURS = ".cloudtrain"
PART = ".cloudtrain-part-keep"  # a file that is being copied; names that begin like store.PARTIAL are nobody's results
# Not a script's results: caches, environments and what version control keeps.
CACHES = {OURS, "__pycache__", ".git", ".cache", ".ipynb_checkpoints", ".pytest_cache", "node_modules", ".venv", "venv"}
ENVIRONMENT, CACHE = "pyvenv.cfg", "CACHEDIR.TAG"  # https://bford.info/cachedir/ (2026-11-27)
_CACHE_FILES = re.compile(r"cache-[0-9a-f]{8}.*\.arrow|.*\.(?:pyc|lock|incomplete)|models--.*|datasets--.*")
_CREDENTIAL_FOLDERS = {".aws", ".azure", ".kube", ".docker", ".ssh", ".gnupg", ".huggingface"}
LONGEST_PATH = 800  # bytes; stores take 1,024
_CHECKPOINT = re.compile(r"(?:checkpoint|ckpt|global_step|step|epoch|iter)[-_=]?\d+.*|.+\.ckpt")
_LAST = ("trainer_state.json", "random_states_0.pkl", "COMPLETE")  # transformers.Trainer, Accelerate, our own
_BEFORE_LAST = re.compile(r"training_args\.bin|(?:optimizer|scheduler|sampler|scaler)\.\w+|rng_state.*\.pth")
_SHARDED, _SHARDED_LAST = ".distcp", ".metadata"  # torch.distributed.checkpoint, of FSDP and Lightning too
_DEEPSPEED, _DEEPSPEED_LAST = re.compile(r"global_step\d+"), "latest"  # that one is beside the folder


def files(folder: str, roots: Sequence[str]) -> Iterator[str]:
    """Yield relative paths of the regular files below some places of a folder (links to files count), without caches."""
    for root in roots:
        top = os.path.join(folder, root)
        if os.path.isfile(top):
            yield root
        for at, below, _, names in _walk(top, folder):
            for name in names:
                path = os.path.join(at, name)
                if os.path.isfile(path) and not name.startswith(PART):
                    yield below + name


def _walk(top: str, folder: str) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Yield each folder below `top`, its name below `folder` with a /, its folders and its files; without caches."""
    for at, folders, names in os.walk(top):
        below = os.path.relpath(at, folder).replace(os.sep, "/") + "/"
        folders[:] = [name for name in folders if name not in CACHES and not _is_cache(os.path.join(at, name))]
        yield at, below if below != "./" else "", folders, names


def folder_links(folder: str, since_ns: int) -> dict[str, str]:
    """Return the links to folders below a folder that were made since a time, and where they lead: nothing follows them."""
    found = {}
    for at, below, folders, _ in _walk(folder, folder):
        for name in folders:
            path = os.path.join(at, name)
            if os.path.islink(path) and os.lstat(path).st_ctime_ns >= since_ns:
                found[below + name] = os.readlink(path)
    return found


def _is_cache(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, mark)) for mark in (ENVIRONMENT, CACHE))


def is_result(name: str) -> bool:
    """Return whether a file can be a result by its name: no credentials, no file of a cache."""
    parts = name.split("/")
    return not (
        credentials.suspicious_name(name)
        or (_CREDENTIAL_FOLDERS & {*parts[:-1]})
        or any(_CACHE_FILES.fullmatch(part) for part in parts)
    )


def is_storable(name: str) -> bool:
    """Return whether object stores take a name: UTF-8, no control characters, not too long with what goes before it."""
    try:
        return len(name.encode()) <= LONGEST_PATH and not re.search(r"[\x00-\x1f\x7f]", name)
    except UnicodeEncodeError:
        return False


def holds_credentials(path: str, masks: Masks) -> bool:
    """Return whether a text file holds what looks like a credential, or a secret of the job. Raises OSError."""
    if os.path.getsize(path) > credentials.MAX_BYTES:
        return False
    with open(path, "rb") as file:
        data = file.read(credentials.MAX_BYTES)
    return not credentials.is_binary(data) and bool(credentials.search(data) or masks.apply(data) != data)


def is_saved_state(name: str) -> bool:
    """Return whether a file by itself can be a checkpoint, by its name."""
    return name.endswith((".pt", ".pth", ".ckpt", ".pth.tar", ".pkl", ".safetensors", ".keras", ".h5"))


def checkpoint_of(name: str) -> str:
    """Return the folder of the checkpoint that a file belongs to, the outermost one; "" for any other file."""
    parts = name.split("/")[:-1]
    return next(("/".join(parts[: at + 1]) for at, part in enumerate(parts) if _CHECKPOINT.fullmatch(part)), "")


def is_whole(folder: str, names: Collection[str], beside: Collection[str] = ()) -> bool | None:
    """Return whether a checkpoint has its last file, None for a kind that is not known.

    `names` are the files of the folder by their paths from the same place as the folder, `beside` all that are there.
    """
    inner = {name[len(folder) + 1 :] for name in names}
    sharded = {os.path.dirname(name) for name in inner if name.endswith(_SHARDED)}
    if any(os.path.join(at, _SHARDED_LAST) not in inner for at in sharded):
        return False
    if any(last in inner for last in _LAST):
        return True
    if _DEEPSPEED.fullmatch(os.path.basename(folder)):
        return os.path.join(os.path.dirname(folder), _DEEPSPEED_LAST) in beside
    if any(_BEFORE_LAST.fullmatch(name) for name in inner):
        return False
    return True if sharded else None


def open_for_writing(folder: str) -> set[str]:
    """Return the files below a folder that a process holds open for writing, where /proc shows it."""
    found: set[str] = set()
    inside = os.path.realpath(folder) + os.sep
    for process in filter(str.isdigit, _names("/proc")):
        for number in _names(f"/proc/{process}/fd"):
            try:
                path = os.readlink(f"/proc/{process}/fd/{number}")
                if path.startswith(inside) and path not in found:
                    with open(f"/proc/{process}/fdinfo/{number}") as about:
                        flags = next(line for line in about if line.startswith("flags:"))
                    if int(flags.split()[1], 8) & os.O_ACCMODE:
                        found.add(path)
            except (OSError, StopIteration, ValueError):
                continue  # it has ended meanwhile, or is another user's
    return {path[len(inside) :] for path in found}


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
