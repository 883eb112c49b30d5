"""The job's inputs on this node: local paths are checked, objects in a store are downloaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .orders import Refused
from .output import Log

STORES = {"s3": "s3fs", "gs": "gcsfs"}  # scheme -> distribution that fsspec needs for it


def resolve(wanted: Mapping[str, Mapping[str, str]], into: str, log: Log) -> dict[str, str]:
    """Return name -> path for every input; blocking (downloads). Raises Refused with all that is missing."""
    found, problems = {}, []
    for name, item in wanted.items():
        uri = item["uri"]
        scheme = uri.partition("://")[0] if "://" in uri else "file"
        try:
            if scheme == "file":
                found[name] = _local(name, uri)
            elif scheme in STORES:
                found[name] = _download(name, uri, scheme, os.path.join(into, name), log)
            else:
                problems.append(f"the input {name} is at {uri}, which this node cannot reach")
        except Refused as problem:
            problems.append(str(problem))
    if problems:
        raise Refused("; ".join(problems))
    return found


def _local(name: str, uri: str) -> str:
    path = uri[len("file://") :] if uri.startswith("file://") else uri
    if not os.path.exists(path):
        raise Refused(f"the input {name} does not exist on this node: {path}")
    if not os.access(path, os.R_OK):
        raise Refused(f"the input {name} cannot be read on this node: {path}")
    return os.path.abspath(path)


def _download(name: str, uri: str, scheme: str, into: str, log: Log) -> str:
    """Copy an object, or all objects below a prefix, into a folder and return its path."""
    from .secret import load, one_line

    fsspec = load("fsspec", f"fsspec {STORES[scheme]}", f"the input {name} ({uri})")
    load(STORES[scheme], STORES[scheme], f"the input {name} ({uri})")
    os.makedirs(into, exist_ok=True)
    try:
        files, paths = fsspec.core.url_to_fs(uri)
        single = not uri.endswith("/") and files.isfile(paths)
        target = os.path.join(into, os.path.basename(paths)) if single else into
        # With a slash at its end a prefix stands for what is below it, whether the folder exists or not.
        files.get(paths if single else paths.rstrip("/") + "/", target, recursive=not single)
    except OSError as error:
        if getattr(error, "errno", None) == 28:
            raise
        raise Refused(f"the input {name} cannot be read from {uri}: {one_line(error)}") from None
    except Exception as error:
        raise Refused(f"the input {name} cannot be read from {uri}: {one_line(error)}") from None
    log.say(f"input {name}: {uri} is at {target}")
    return target
