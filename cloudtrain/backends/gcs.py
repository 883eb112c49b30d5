"""A Cloud Storage bucket: put a bundle there once, bring a run's folders back."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from pathlib import Path
from typing import IO
from urllib.parse import quote

from cloudtrain.backends import google
from cloudtrain.backends.google import Api, ApiError
from cloudtrain.errors import BackendError, Unreachable

PIECE = 16 << 20  # bytes in one request of an upload; a multiple of 256 KiB
SMALL = 8 << 20  # bytes; below, one request does it
AT_ONCE = 4  # downloads


class Bucket:
    """One bucket of an account; every call blocks. Raises ApiError, Unreachable."""

    def __init__(self, api: Api, name: str) -> None:
        self._api, self.name = api, name

    def has(self, name: str, size: int | None = None) -> bool:
        """Return whether an object (of that size) exists."""
        what = f"gs://{self.name}/{name} cannot be looked up"
        found = self._api.call("GET", "storage", self._at(name), what, query={"fields": "size"}, fine=(404,))
        if found.status == 404:
            if "bucket" in found.body.decode("utf-8", "replace").lower():
                raise ApiError(404, f"the bucket {self.name} does not exist", "the source cannot be uploaded")
            return False
        return size is None or int(found.json["size"]) == size

    def put_once(self, path: Path, name: str) -> bool:
        """Upload a file unless an object of that name exists, whoever else may be doing the same; False when it did.

        Nothing is sent for an object that exists.
        """
        if self.has(name):
            return False
        what = f"the source cannot be uploaded to gs://{self.name}/{name}"
        size = path.stat().st_size
        query = {"name": name, "ifGenerationMatch": "0"}
        place = f"/upload/storage/v1/b/{quote(self.name)}/o"
        kind = {"Content-Type": "application/gzip"}
        if size <= SMALL:
            # Sent twice after an answer that got lost, it finds its own object: 412 is success.
            once = {**query, "uploadType": "media"}
            sent = self._api.call(
                "POST", "storage", place, what, query=once, data=path.read_bytes(), headers=kind, fine=(412,)
            )
            return sent.status != 412
        begin = {**query, "uploadType": "resumable"}
        session = self._api.call(
            "POST", "storage", place, what, query=begin, body={"contentType": kind["Content-Type"]}, fine=(412,)
        )
        return session.status != 412 and self._send(path, size, session.headers["location"], what)

    def sizes(self, prefix: str) -> dict[str, tuple[int, str]]:
        """Return name -> (bytes, MD5) of all objects below a prefix."""
        found: dict[str, tuple[int, str]] = {}
        query = {"prefix": prefix, "fields": "items(name,size,md5Hash),nextPageToken", "maxResults": "1000"}
        while True:
            what = f"gs://{self.name}/{prefix} cannot be listed"
            page = self._api.call("GET", "storage", f"/storage/v1/b/{quote(self.name)}/o", what, query=query).json
            for item in page.get("items", ()):
                found[item["name"]] = (int(item["size"]), item.get("md5Hash", ""))
            if not page.get("nextPageToken"):
                return found
            query["pageToken"] = page["nextPageToken"]

    def read(self, name: str, into: IO[bytes]) -> None:
        """Write an object's bytes into a file."""
        self._api.read("storage", f"{self._at(name)}?alt=media", f"gs://{self.name}/{name} cannot be read", into)

    def bring(self, prefix: str, into: Path) -> int:
        """Copy all objects below a prefix into a folder, and return how many; what is here and equal is not read again.

        Raises BackendError for a name that would lead out of the folder.
        """
        from concurrent.futures import ThreadPoolExecutor

        found = {name[len(prefix) :]: about for name, about in self.sizes(prefix).items()}
        names = [name for name in found if name and not name.endswith("/")]
        for name in names:
            if not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise BackendError(f"gs://{self.name} offers an object {prefix + name!r}, which is refused")

        def fetch(name: str) -> None:
            place = into / name
            size, md5 = found[name]
            if place.is_file() and place.stat().st_size == size and (not md5 or _md5(place) == md5):
                return
            place.parent.mkdir(parents=True, exist_ok=True)
            half = place.with_name(f".{place.name}.{os.getpid()}")
            with open(half, "wb") as file:
                self.read(prefix + name, file)
            half.replace(place)

        with ThreadPoolExecutor(AT_ONCE, "fetch") as pool:
            list(pool.map(fetch, names))
        return len(names)

    def _send(self, path: Path, size: int, session: str, what: str) -> bool:
        """Send the pieces of a resumable upload; one that broke off goes on where it was."""
        at = stuck = 0
        with open(path, "rb") as file:
            while True:
                file.seek(at)
                piece = file.read(PIECE)
                span = {"Content-Range": f"bytes {at}-{at + len(piece) - 1}/{size}"}
                try:
                    sent = self._api.call(
                        "PUT", "storage", session, what, data=piece, headers=span, tries=1, fine=(308, 412)
                    )
                except Unreachable:
                    stuck += 1
                    if stuck == google.TRIES:
                        raise
                    asked = {"Content-Range": f"bytes */{size}"}
                    sent = self._api.call("PUT", "storage", session, what, data=b"", headers=asked, fine=(308, 412))
                if sent.status != 308:
                    return sent.status != 412
                known = sent.headers.get("range", "")
                former, at = at, int(known.rpartition("-")[2]) + 1 if known else 0
                if at > former:
                    stuck = 0
                else:
                    time.sleep(google.PAUSE_S * 2**stuck)

    def _at(self, name: str) -> str:
        return f"/storage/v1/b/{quote(self.name)}/o/{quote(name, safe='')}"


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return base64.b64encode(hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()).decode()
