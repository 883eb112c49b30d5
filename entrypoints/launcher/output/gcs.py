"""Google Cloud Storage client of the standard library, for containers and pods without gcsfs.

It has as much of fsspec's interface as store.py uses. Credentials are those of the container, from the metadata server.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import http.client
import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request

from ..clock import SYSTEM, Clock

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

TOKEN = "computeMetadata/v1/instance/service-accounts/default/token"
PIECE = 32 << 20  # bytes in one request of an upload; a multiple of 256 KiB
TRIES = 6
TIMEOUT_S = 60.0
LATER = (408, 429, 500, 502, 503, 504)  # the same request may work later


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects within a host alone: urllib would send a request's token to any other one too."""

    def redirect_request(self, req: urllib.request.Request, *rest: Any) -> urllib.request.Request | None:
        redirected = super().redirect_request(req, *rest)
        old, new = (urllib.parse.urlsplit(each.full_url)[:2] if each else None for each in (req, redirected))
        return redirected if old == new else None


def send(request: urllib.request.Request) -> Any:
    """Return the answer to a request that carries credentials; raises OSError."""
    return urllib.request.build_opener(_SameHost).open(request, timeout=TIMEOUT_S)


def download(
    look: Callable[[], Mapping[str, Any]], read: Callable[[Mapping[str, Any], int, int], bytes], target: str, piece: int
) -> None:
    """Copy an object into a file in pieces; one that changes meanwhile, or has another checksum, is copied again.

    Args:
        look: returns its size, its MD5 ("" for none), and what `read` needs to read this version alone.
        read: returns the bytes from the first to the last; an OSError with ESTALE says that the version is gone.
        target: the file's path.
        piece: bytes in one request.
    """
    for turn in range(TRIES):
        try:
            _download_version(look(), read, target, piece)
            return
        except OSError as error:
            if error.errno != errno.ESTALE or turn == TRIES - 1:
                raise


def _download_version(
    info: Mapping[str, Any], read: Callable[[Mapping[str, Any], int, int], bytes], target: str, piece: int
) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with open(target, "wb") as file:
        while (at := file.tell()) < info["size"]:
            data = read(info, at, min(at + piece, info["size"]) - 1)
            if not data:
                raise OSError(errno.ESTALE, "the object became shorter while it was read")
            digest.update(data)
            file.write(data)
    if info["md5"] not in ("", base64.b64encode(digest.digest()).decode()):
        raise OSError(errno.ESTALE, "the download differs from the stored object")


class Files:
    """Objects by "bucket/name"; every call blocks. Raises OSError, FileNotFoundError where there is no such thing."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._emulator = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
        self._base = self._emulator or "https://storage.googleapis.com"
        self._token, self._valid_until = "", 0.0
        self._lock = threading.Lock()

    def info(self, path: str) -> dict[str, Any]:
        return _entry(json.loads(self._ask("GET", _object(path))[1]))

    def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        """Return all objects below a folder, by their paths."""
        bucket, _, prefix = path.partition("/")
        objects, token = {}, ""
        while True:
            query = urllib.parse.urlencode(
                {"prefix": prefix, "maxResults": 1000, **({"pageToken": token} if token else {})}
            )
            page = json.loads(self._ask("GET", f"/storage/v1/b/{bucket}/o?{query}")[1])
            objects.update({f"{bucket}/{item['name']}": _entry(item) for item in page.get("items", ())})
            token = page.get("nextPageToken", "")
            if not token:
                return objects

    def cat_file(self, path: str) -> bytes:
        return self._ask("GET", _object(path) + "?alt=media")[1]

    def get_file(self, path: str, target: str) -> None:
        """Copy an object into a file; a transfer that breaks off continues where it was."""

        def read(info: Mapping[str, Any], first: int, last: int) -> bytes:
            url = f"{_object(path)}?alt=media&ifGenerationMatch={info['generation']}"
            return self._ask("GET", url, {"Range": f"bytes={first}-{last}"})[1]

        download(lambda: self.info(path), read, target, PIECE)

    def put_file(self, path: str, target: str) -> None:
        """Copy a file; the object is replaced at once, when all of it has come."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= PIECE:
                self.pipe_file(target, file.read())
                return
            begin = self._ask("POST", _upload(target, "resumable"), {"Content-Type": "application/json"}, b"{}")[0]
            session, at = begin["location"], 0
            while at < size:
                file.seek(at)
                piece = file.read(min(PIECE, size - at))
                if not piece:
                    raise OSError(errno.EIO, "the file became shorter while it was uploaded")
                head = self._ask("PUT", session, {"Content-Range": f"bytes {at}-{at + len(piece) - 1}/{size}"}, piece)[
                    0
                ]
                received = head.get("range", "")
                at = int(received.rpartition("-")[2]) + 1 if received else at + len(piece)

    def pipe_file(self, target: str, data: bytes, mode: str = "overwrite") -> None:
        """Write an object; with mode create only where there is none."""
        condition = "&ifGenerationMatch=0" if mode == "create" else ""
        self._ask("POST", _upload(target, "media") + condition, {"Content-Type": "application/octet-stream"}, data)

    def rm_file(self, path: str) -> None:
        self._ask("DELETE", _object(path))

    def _ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, data: bytes | None = None
    ) -> tuple[dict[str, str], bytes]:
        """Return headers and body of an answer; tries again what may work later."""
        why = ""
        for turn in range(TRIES):
            if turn:
                self._clock.sleep(min(2.0**turn / 4, 8.0))
            try:
                url = path if path.startswith("http") else self._base + path
                request = urllib.request.Request(url, data, {**self._signed(), **(headers or {})}, method=method)
                with send(request) as answer:
                    return _small(answer.headers), answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    body, status = error.read().decode("utf-8", "replace"), error.code
                if status == 308:  # a piece of an upload has come
                    return _small(error.headers), b""
                if status == 404:
                    raise FileNotFoundError(errno.ENOENT, "the bucket or object does not exist") from None
                why = f"{status} {' '.join(body.split())[:200]}"
                if status == 412:
                    raise OSError(errno.ESTALE, why) from None  # the object is another version
                if status not in LATER:
                    raise PermissionError(errno.EACCES if status in (401, 403) else errno.EIO, why) from None
            except (OSError, http.client.HTTPException) as error:
                why = str(error)
        raise OSError(errno.EIO, f"{method} {self._base}: {why}")

    def _signed(self) -> dict[str, str]:
        if self._emulator:
            return {}
        with self._lock:
            if self._clock.monotonic() >= self._valid_until:
                host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
                request = urllib.request.Request(f"http://{host}/{TOKEN}", headers={"Metadata-Flavor": "Google"})
                with send(request) as answer:
                    grant = json.load(answer)
                self._token = grant["access_token"]
                self._valid_until = self._clock.monotonic() + max(0.0, float(grant["expires_in"]) - 120)
            return {"Authorization": f"Bearer {self._token}"}


def _object(path: str) -> str:
    bucket, _, name = path.partition("/")
    return f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}"


def _upload(path: str, kind: str) -> str:
    bucket, _, name = path.partition("/")
    query = urllib.parse.urlencode({"uploadType": kind, "name": name}, quote_via=urllib.parse.quote)
    return f"/upload/storage/v1/b/{bucket}/o?{query}"


def _entry(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "file", "size": int(item["size"]), "generation": item["generation"], "md5": item.get("md5Hash", "")}


def _small(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
