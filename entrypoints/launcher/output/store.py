"""Object store client (s3://, gs:// on fsspec, az://): list, fetch, put and delete objects below one prefix.

Credentials and endpoints are found by the platform's own means (AWS_ENDPOINT_URL, STORAGE_EMULATOR_HOST and so on).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Mapping

from ..clock import SYSTEM, Clock
from ..errors import Refused, one_line

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

CLIENTS = {"s3": "s3fs", "gs": "gcsfs", "az": ""}  # scheme -> module that fsspec needs for it; "": none is needed
HINT = "pip install 'cloudtrain[storage]'"
PROXY = (
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
)  # not HTTP_PROXY: machines' identities are by http
OWN = (
    "AWS_",
    "GOOGLE_",
    "STORAGE_EMULATOR_HOST",
    "CLOUDSDK_",
    "AZURE_",
    *PROXY,
)  # what clients read from the environment
AT_ONCE = 4  # transfers
UNCONDITIONAL = ("NotImplemented", "unexpected keyword")  # in the error of a store or client without conditional writes
PARTIAL = ".cloudtrain-part-"  # begins the name of a file that is being fetched
LONGEST_NAME = 255  # bytes of a file's name


class Failed(Exception):
    """The store did not do what was asked: one sentence."""


def scheme(uri: str) -> str:
    """Return s3, gs, az, or whatever stands before ://; file for a path."""
    return uri.partition("://")[0].lower() if "://" in uri else "file"


def lend(environ: Mapping[str, str]) -> None:
    """Export the job's credentials (env and secrets) for the clients in this process."""
    for name, value in environ.items():
        if name.startswith(OWN):
            os.environ[name] = value


class _Absent(Failed):
    """There is no such bucket or object."""


class Store:
    """Objects below s3://bucket/prefix, gs://bucket/prefix or az://container@account/prefix, by names relative to it.

    Every call blocks.

    Raises Refused where the client is absent, Failed when the store does not answer as it should.
    """

    def __init__(self, uri: str, purpose: str, clock: Clock = SYSTEM) -> None:
        kind = scheme(uri)
        self.uri = uri.rstrip("/")
        self._path = self.uri.partition("://")[2]
        if not self._path.partition("/")[0]:
            raise Refused(f"{purpose} is not the URI of a bucket: {uri}")
        if kind == "az":
            from .blob import Files as Blobs

            try:
                self._files: Any = Blobs(self._path.partition("/")[0], clock)
            except ValueError as error:
                raise Refused(f"{purpose}: {error}") from None
            return
        own = os.environ.get("CLUSTER_SPEC") or os.environ.get("JOB_COMPLETION_INDEX")
        if kind == "gs" and own and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            # On Vertex AI, and in pods that have a workload identity, images need not bring a client.
            from .gcs import Files

            self._files = Files(clock)
            return
        try:
            import fsspec

            __import__(CLIENTS[kind])
        except ImportError:
            raise Refused(f"{purpose} ({uri}) needs fsspec and {CLIENTS[kind]} on the node: {HINT}") from None
        if kind == "gs" and os.environ.get("STORAGE_EMULATOR_HOST"):
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # emulators do not support that
        try:
            # Listings change while we look: other nodes and earlier attempts write there too.
            self._files = fsspec.filesystem(kind, use_listings_cache=False, skip_instance_cache=True)
        except Exception as error:
            raise Failed(f"{self.uri} cannot be opened: {one_line(error)}") from None

    def size(self) -> tuple[int, str] | None:
        """Return size and version of the object that the URI itself names, or None where there is none."""
        if "/" not in self._path:
            return None
        try:
            info = self._ask(lambda: self._files.info(self._path))
        except _Absent:
            return None  # a prefix, or nothing: a listing shows which
        return None if info.get("type") == "directory" else _about(info)

    def list(self, below: str = "") -> dict[str, tuple[int, str]]:
        """Return relative name -> (bytes, version) of all objects below a folder; empty where there are none."""
        folder = self._at(below).rstrip("/") + "/"
        entries = self._ask(lambda: self._files.find(folder, detail=True, withdirs=False))
        return {
            name[len(folder) :]: _about(info)
            for name, info in entries.items()
            # An empty object whose name ends in / is what consoles make of a folder.
            if name.startswith(folder)
            and info.get("type") != "directory"
            and not (name[-1] == "/" and not info["size"])
        }

    def get(self, name: str, path: str) -> None:
        """Copy an object into a file that does not exist before it is whole; raises OSError for the local side."""
        part = os.path.join(os.path.dirname(path), f"{PARTIAL}{os.getpid()}-{threading.get_ident()}")
        try:
            self._ask(lambda: self._files.get_file(self._at(name), part))
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)

    def read(self, name: str) -> bytes | None:
        """Return an object's bytes, or None where there is none."""
        try:
            return bytes(self._ask(lambda: self._files.cat_file(self._at(name))))
        except _Absent:
            return None

    def put(self, path: str, name: str) -> None:
        """Copy a file; what stood there is replaced at once when the copy is whole."""
        self._ask(lambda: self._files.put_file(path, self._at(name)))

    def write(self, name: str, data: bytes) -> None:
        self._ask(lambda: self._files.pipe_file(self._at(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that does not exist; False where there is one already. Of several only one succeeds.

        Data that no other process writes identifies our own request when its answer was lost.
        """
        try:
            self._ask(lambda: self._files.pipe_file(self._at(name), data, mode="create"))  # If-None-Match, generation 0
            return True
        except _Absent:
            raise
        except Failed as error:
            existing = self.read(name)
            if existing is None and any(text in str(error) for text in UNCONDITIONAL):
                self.write(name, data)
                return True
            if existing is None:
                raise
            return existing == data

    def delete(self, name: str) -> None:
        """Remove an object; one that is gone is no error."""
        try:
            self._ask(lambda: self._files.rm_file(self._at(name)))
        except _Absent:
            pass

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FileNotFoundError as error:
            if os.path.isabs(str(error.filename or "")):
                raise  # a file of this machine
            raise _Absent(f"{self.uri}: the bucket or object does not exist") from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) or os.path.isabs(str(error.filename or "")):
                raise  # this machine's disk
            raise Failed(f"{self.uri}: {one_line(error)}") from None
        except Exception as error:
            raise Failed(f"{self.uri}: {one_line(error)}") from None


def _about(info: Mapping[str, Any]) -> tuple[int, str]:
    version = info.get("ETag") or info.get("etag") or info.get("generation") or info.get("LastModified") or ""
    return int(info["size"]), str(version)


def all_at_once(calls: Iterable[Callable[[], object]]) -> list[BaseException]:
    """Do these in a few threads and return what was raised; a failure does not keep the others from being done."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(AT_ONCE, "transfer") as pool:
        tasks = [pool.submit(call) for call in calls]
        return [error for error in (task.exception() for task in tasks) if error is not None]


def check_names(name: str, keys: list[str]) -> None:
    """Refuse keys that are no relative paths of files, or that cannot be files at the same time."""
    folders = {key[:at] for key in keys for at, letter in enumerate(key) if letter == "/"}
    for key in keys:
        parts = key.split("/")
        if any(part in ("", ".", "..") or "\0" in part or len(part.encode()) > LONGEST_NAME for part in parts):
            raise Refused(f"the input {name} has an object whose name is not a valid file name: {key[:200]!r}")
        if key in folders:
            raise Refused(f"the input {name} has an object whose name is also a folder of other objects: {key[:200]!r}")


def format_bytes(size: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
