"""Upload and download objects of a Google Cloud Storage bucket."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from pathlib import Path
from typing import IO
from urllib.parse import quote

from cloudtrain.backends import http
from cloudtrain.backends.google import ApiError, GoogleApi
from cloudtrain.errors import BackendError, Unreachable

CHUNK = 16 << 20  # bytes in one request of a resumable upload; a multiple of 256 KiB
ONE_REQUEST = 8 << 20  # bytes; up to here an upload is a single request
PARALLEL_DOWNLOADS = 4


class Bucket:
    """The objects of one bucket; every call blocks. Raises ApiError, Unreachable."""

    def __init__(self, api: GoogleApi, name: str) -> None:
        self._api, self.name = api, name

    def exists(self, name: str, size: int | None = None) -> bool:
        """Return whether an object exists, with that size if `size` is set."""
        failure = f"gs://{self.name}/{name} cannot be looked up"
        answer = self._api.call(
            "GET", "storage", self._object_path(name), failure, query={"fields": "size"}, accept=(404,)
        )
        if answer.status == 404:
            if "bucket" in answer.data.decode("utf-8", "replace").lower():
                raise ApiError(answer, f"the bucket {self.name} does not exist", "the source cannot be uploaded")
            return False
        return size is None or int(answer.json["size"]) == size

    def upload_once(self, path: Path, name: str) -> bool:
        """Upload a file unless an object of that name exists; False if it exists. Safe against concurrent uploads."""
        if self.exists(name):
            return False
        failure = f"the source cannot be uploaded to gs://{self.name}/{name}"
        size = path.stat().st_size
        query = {"name": name, "ifGenerationMatch": "0"}
        upload_path = f"/upload/storage/v1/b/{quote(self.name)}/o"
        content_type = {"Content-Type": "application/gzip"}
        if size <= ONE_REQUEST:
            # A retry after a lost answer finds its own object: 412 is success.
            one_request = {**query, "uploadType": "media"}
            answer = self._api.call(
                "POST",
                "storage",
                upload_path,
                failure,
                query=one_request,
                data=path.read_bytes(),
                headers=content_type,
                accept=(412,),
            )
            return answer.status != 412
        resumable = {**query, "uploadType": "resumable"}
        session = self._api.call(
            "POST",
            "storage",
            upload_path,
            failure,
            query=resumable,
            body={"contentType": content_type["Content-Type"]},
            accept=(412,),
        )
        return session.status != 412 and self._upload_chunks(path, size, session.headers["location"], failure)

    def list_objects(self, prefix: str) -> dict[str, tuple[int, str]]:
        """Return object name -> (bytes, MD5) of all objects below a prefix."""
        objects: dict[str, tuple[int, str]] = {}
        query = {"prefix": prefix, "fields": "items(name,size,md5Hash),nextPageToken", "maxResults": "1000"}
        while True:
            failure = f"gs://{self.name}/{prefix} cannot be listed"
            page = self._api.call("GET", "storage", f"/storage/v1/b/{quote(self.name)}/o", failure, query=query).json
            for stored in page.get("items", ()):
                objects[stored["name"]] = (int(stored["size"]), stored.get("md5Hash", ""))
            if not page.get("nextPageToken"):
                return objects
            query["pageToken"] = page["nextPageToken"]

    def download(self, name: str, into: IO[bytes]) -> None:
        """Download an object into an open file."""
        failure = f"gs://{self.name}/{name} cannot be read"
        for chunk in self._api.stream("storage", f"{self._object_path(name)}?alt=media", failure):
            into.write(chunk)

    def download_prefix(self, prefix: str, into: Path) -> int:
        """Download all objects below a prefix into a folder, and return how many; equal files are not downloaded again.

        Raises BackendError for a name that would lead out of the folder.
        """
        from concurrent.futures import ThreadPoolExecutor

        objects = {name[len(prefix) :]: size_and_md5 for name, size_and_md5 in self.list_objects(prefix).items()}
        names = [name for name in objects if name and not name.endswith("/")]
        for name in names:
            if not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise BackendError(f"gs://{self.name} offers an object {prefix + name!r}, which is refused")

        def fetch(name: str) -> None:
            path = into / name
            size, md5 = objects[name]
            if path.is_file() and path.stat().st_size == size and (not md5 or _md5(path) == md5):
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            with open(partial, "wb") as file:
                self.download(prefix + name, file)
            partial.replace(path)

        with ThreadPoolExecutor(PARALLEL_DOWNLOADS, "fetch") as pool:
            list(pool.map(fetch, names))
        return len(names)

    def _upload_chunks(self, path: Path, size: int, session: str, failure: str) -> bool:
        """Send the chunks of a resumable upload; an interrupted one resumes at the offset that the server reports."""
        offset = stalled_tries = 0
        with open(path, "rb") as file:
            while True:
                file.seek(offset)
                chunk = file.read(CHUNK)
                content_range = {"Content-Range": f"bytes {offset}-{offset + len(chunk) - 1}/{size}"}
                try:
                    answer = self._api.call(
                        "PUT",
                        "storage",
                        session,
                        failure,
                        data=chunk,
                        headers=content_range,
                        tries=1,
                        accept=(308, 412),
                    )
                except Unreachable:
                    stalled_tries += 1
                    if stalled_tries == http.TRIES:
                        raise
                    status_query = {"Content-Range": f"bytes */{size}"}
                    answer = self._api.call(
                        "PUT", "storage", session, failure, data=b"", headers=status_query, accept=(308, 412)
                    )
                if answer.status != 308:
                    return answer.status != 412
                received_range = answer.headers.get("range", "")
                previous_offset, offset = offset, int(received_range.rpartition("-")[2]) + 1 if received_range else 0
                if offset > previous_offset:
                    stalled_tries = 0
                else:
                    time.sleep(http.PAUSE_S * 2**stalled_tries)

    def _object_path(self, name: str) -> str:
        return f"/storage/v1/b/{quote(self.name)}/o/{quote(name, safe='')}"


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return base64.b64encode(hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()).decode()
