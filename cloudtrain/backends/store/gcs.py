"""Objects of a Google Cloud Storage bucket, over its JSON API."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cloudtrain.backends import http
from cloudtrain.backends.google import ApiError, GoogleApi
from cloudtrain.backends.http import Answer
from cloudtrain.backends.store.download import ChangedError, StoredObject, digest
from cloudtrain.backends.store.files import Objects, bounded
from cloudtrain.errors import Unreachable
from cloudtrain.job.units import unix_time

CHUNK = 16 << 20  # bytes in one request of a resumable upload; a multiple of 256 KiB
ONE_REQUEST = 8 << 20  # bytes; up to here an upload is a single request
FIELDS = "name,size,md5Hash,crc32c,generation,updated"


class Gcs(Objects):
    """Objects at gs://bucket/prefix. Every call blocks; raises ApiError, Unreachable."""

    def __init__(self, api: GoogleApi, uri: str) -> None:
        super().__init__(uri)
        self._api = api

    def check_credentials(self) -> None:
        self._api.check_credentials()

    def folders(self) -> Iterator[str]:
        prefix = self._prefix("")
        for page in self._pages(prefix, "prefixes", delimiter="/"):
            yield from (str(name)[len(prefix) : -1] for name in page.get("prefixes", ()))

    def read(self, name: str, most: int) -> bytes | None:
        try:
            return bounded(self._read(name), most, f"{self.uri}/{name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def add(self, name: str, data: bytes | Path) -> bool:
        """A large file is uploaded in pieces; an interrupted upload continues."""
        if isinstance(data, Path) and self.look_up(name) is not None:
            return False
        failure = f"gs://{self.bucket}/{self.key(name)} cannot be written"
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        kind = "application/gzip" if isinstance(data, Path) else "application/octet-stream"

        def begin(upload_type: str, **content: Any) -> Answer:
            # A retry after a lost answer finds its own object: 412 is success.
            query = {"name": self.key(name), "ifGenerationMatch": "0", "uploadType": upload_type}
            path = f"/upload/storage/v1/b/{quote(self.bucket)}/o"
            return self._api.call("POST", "storage", path, failure, query=query, accept=(412,), **content)

        if isinstance(data, bytes) or size <= ONE_REQUEST:
            content = data if isinstance(data, bytes) else data.read_bytes()
            return begin("media", data=content, headers={"Content-Type": kind}).status != 412
        session = begin("resumable", body={"contentType": kind, "md5Hash": _base64(digest(data, "md5"))})
        return session.status != 412 and self._upload_chunks(data, size, session.headers["location"], failure)

    def delete(self, name: str) -> None:
        failure = f"gs://{self.bucket}/{self.key(name)} cannot be deleted"
        self._api.call("DELETE", "storage", self._object_path(name), failure, accept=(404,))

    def look_up(self, name: str) -> StoredObject | None:
        failure = f"gs://{self.bucket}/{self.key(name)} cannot be read"
        path, query = self._object_path(name), {"fields": FIELDS}
        answer = self._api.call("GET", "storage", path, failure, query=query, accept=(404,))
        if answer.status == 404:
            if b"bucket does not exist" in answer.data:  # the name of a bucket may have the word, too
                raise ApiError(answer, f"the bucket {self.bucket} does not exist", failure)
            return None
        return self._stored(answer.json, self.key(name).rpartition("/")[2])

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        for page in self._pages(prefix, f"items({FIELDS})"):
            yield from (self._stored(item, str(item["name"])) for item in page.get("items", ()))

    def _pages(self, prefix: str, fields: str, **more: str) -> Iterator[Mapping[str, Any]]:
        failure = f"gs://{self.bucket}/{prefix} cannot be listed"
        query = {"prefix": prefix, "fields": f"{fields},nextPageToken", "maxResults": "1000", **more}
        while True:
            page = self._api.call("GET", "storage", f"/storage/v1/b/{quote(self.bucket)}/o", failure, query=query).json
            yield page
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def _read(self, name: str, condition: str = "", first: int = 0, last: int | None = None) -> Iterator[bytes]:
        failure = f"gs://{self.bucket}/{self.key(name)} cannot be read"
        path = f"{self._object_path(name)}?alt=media{condition}"
        return self._api.stream("storage", path, failure, first, last)

    def _stored(self, item: Mapping[str, Any], name: str) -> StoredObject:
        updated, generation = item.get("updated"), str(item.get("generation", ""))
        whole = Gcs(self._api, f"gs://{self.bucket}/{item['name']}")
        return StoredObject(
            name=name,
            uri=whole.uri,
            size=int(item["size"]),
            version=generation,
            modified_ns=int(unix_time(updated)) * 1_000_000_000 if updated else 0,
            read=partial(whole._read_version, generation),
            verify=partial(_verify, item),
            refresh=partial(whole.look_up, ""),
        )

    def _read_version(self, generation: str, first: int, last: int) -> Iterator[bytes]:
        try:
            yield from self._read("", f"&ifGenerationMatch={generation}" if generation else "", first, last)
        except ApiError as error:
            if error.status in (404, 412):
                raise ChangedError from None
            raise

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
                    self._api.clock.sleep(http.PAUSE_S * 2**stalled_tries)

    def _object_path(self, name: str) -> str:
        return f"/storage/v1/b/{quote(self.bucket)}/o/{quote(self.key(name), safe='')}"


def _verify(item: Mapping[str, Any], path: Path) -> bool | None:
    """Return whether a file has the object's checksum, None without one. A composite object has no MD5."""
    if md5 := item.get("md5Hash"):
        return _base64(digest(path, "md5")) == str(md5)
    if (crc32c := item.get("crc32c")) and find_spec("google_crc32c"):
        import google_crc32c

        value = 0
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                value = google_crc32c.extend(value, chunk)
        return _base64(value.to_bytes(4, "big")) == str(crc32c)
    return None


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
