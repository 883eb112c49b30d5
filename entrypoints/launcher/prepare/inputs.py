"""Prepare the job's inputs: check local paths, copy objects from a store, or pass their URI to the script.

copy     into the node's folder; CLOUDTRAIN_INPUT_<NAME> is a path
stream   not touched; CLOUDTRAIN_INPUT_<NAME> is the URI, which the script opens itself
mount    only where the platform mounts (it then comes as a path): refused here
given    the platform has brought it, and its path or URI is in a variable of this node
channel  SageMaker has laid it below /opt/ml/input/data; `file` names the one object that an input is

Results of a run that are an archive, as SageMaker keeps them, are unpacked: the path is that of the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Mapping

from ..errors import Refused
from ..folder_writer import FolderWriter, Unsafe, unpack
from ..log import Log
from ..output import store
from ..world.cluster import sagemaker_base

LOG_EVERY_S = 10.0
ARCHIVE = ".tar.gz"


def resolve(wanted: Mapping[str, Mapping[str, str]], into: str, log: Log) -> dict[str, str]:
    """Return name -> path or URI for every input; blocking (downloads). Raises Refused with all that is missing."""
    paths, problems = {}, []
    for name, item in wanted.items():
        uri, mode = item["uri"], item.get("mode", "copy")
        kind = store.scheme(uri)
        try:
            if mode == "channel":
                paths[name] = _channel(name, item.get("file", ""))
            elif mode == "given":
                given = os.environ.get(item["variable"], "")
                paths[name] = given if "://" in given else _local(name, given)
            elif kind == "file":
                paths[name] = _local(name, uri)
            elif mode == "stream":
                paths[name] = uri
            elif mode == "mount":
                problems.append(
                    f"the input {name} cannot be mounted on this node ({uri}): set its mode to copy or stream"
                )
            elif kind in store.CLIENTS:
                paths[name] = _copy(name, uri, into, log)
            else:
                problems.append(
                    f"the input {name} is at {uri}, and a node can read only folders, s3://, gs:// and az://"
                )
            if item.get("run") and uri.endswith(ARCHIVE) and mode != "stream" and name in paths:
                paths[name] = _unpack(name, paths[name], into, log)
        except (Refused, store.Failed) as problem:
            about = "" if str(problem).startswith("the input") else f"the input {name} cannot be read: "
            problems.append(f"{about}{problem}")
    if problems:
        raise Refused("; ".join(problems))
    return paths


def _channel(name: str, file: str) -> str:
    path = os.path.join(sagemaker_base(os.environ), "input", "data", name)
    single = os.path.join(path, file)
    return _local(name, single if file and os.path.isfile(single) else path)


def _local(name: str, uri: str) -> str:
    path = os.path.expanduser(uri[len("file://") :] if uri.startswith("file://") else uri)
    if not os.path.exists(path):
        raise Refused(f"the input {name} does not exist on this node: {path}")
    if not os.access(path, os.R_OK):
        raise Refused(f"the input {name} cannot be read on this node: {path}")
    return os.path.abspath(path)


def _copy(name: str, uri: str, into: str, log: Log) -> str:
    """Copy an object, or all objects below a prefix, and return the path; what is there is whole.

    Files are collected in a folder that is renamed at the end; an interrupted preparation continues with them.
    """
    there = store.Store(uri, f"the input {name}", log.clock)
    single = None if uri.endswith("/") else there.size()
    base = os.path.basename(there.uri)
    files = {base: single} if single is not None else there.list()
    if not files:
        raise Refused(f"the input {name} does not exist: no files at {uri}")
    store.check_names(name, list(files))
    whole = os.path.join(into, name)
    target = os.path.join(whole, base) if single is not None else whole
    if os.path.isdir(whole):
        return target
    # Named by what is in the store, so that files of an older state are never mixed with newer ones.
    state = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:16]
    half = os.path.join(into, f".{name}.{state}.half")
    os.makedirs(half, exist_ok=True)
    wanted = {}
    for file, (size, _) in files.items():
        path = os.path.join(half, file)
        if not (os.path.isfile(path) and os.path.getsize(path) == size):
            wanted[file] = size
    total = sum(wanted.values())
    free = shutil.disk_usage(half).free
    if total > free:
        raise Refused(
            f"the input {name} has {store.format_bytes(total)}, {store.format_bytes(free)} are free on this node"
        )
    log.say(f"input {name}: copying {len(wanted)} of {len(files)} files, {store.format_bytes(total)}, from {uri}")
    progress = _Progress(log, name, len(wanted), total)

    def fetch(file: str, size: int) -> None:
        path = os.path.join(half, file)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        there.get("" if single is not None else file, path)
        if os.path.getsize(path) != size:
            os.unlink(path)
            raise store.Failed(f"{uri} changed while it was read")
        progress.add(size)

    errors = store.all_at_once([lambda file=file, size=size: fetch(file, size) for file, size in wanted.items()])
    if errors:
        raise errors[0]
    os.replace(half, whole)
    log.say(f"input {name}: {uri} is at {target}")
    return target


def _unpack(name: str, archive: str, into: str, log: Log) -> str:
    """Unpack an archive into a folder beside the inputs and return that; what is there is whole. Raises Refused.

    A job wrote the archive: what leads out of the folder, or is neither file, folder nor link, is refused. Owners are ours.
    """
    whole = os.path.join(into, ".unpacked", name)
    if os.path.isdir(whole):
        return whole
    half = f"{whole}.half"
    shutil.rmtree(half, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:gz") as packed, FolderWriter(half, new=True) as folder:
            unpack(packed, folder)
        os.replace(half, whole)
    except (OSError, EOFError, zlib.error, tarfile.TarError, Unsafe) as error:
        shutil.rmtree(half, ignore_errors=True)
        raise Refused(f"the input {name} cannot be unpacked: {archive}: {error}") from None
    log.say(f"input {name}: {archive} is unpacked at {whole}")
    return whole


class _Progress:
    """Logs the progress of a copy from time to time."""

    def __init__(self, log: Log, name: str, files: int, total: int) -> None:
        self._log, self._name, self._files, self._total = log, name, files, total
        self._done, self._bytes, self._reported_at = 0, 0, log.clock.monotonic()

    def add(self, size: int) -> None:
        self._done += 1
        self._bytes += size
        if self._log.clock.monotonic() - self._reported_at >= LOG_EVERY_S:
            self._reported_at = self._log.clock.monotonic()
            how_far = f"{store.format_bytes(self._bytes)} of {store.format_bytes(self._total)}"
            self._log.say(f"input {self._name}: {self._done} of {self._files} files, {how_far}")
