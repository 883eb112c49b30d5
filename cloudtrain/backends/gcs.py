"""Upload and download objects of a Google Cloud Storage bucket."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cloudtrain.backends import http
from cloudtrain.backends.download import ChangedError, StoredObject, digest, download_all
from cloudtrain.backends.google import ApiError, GoogleApi
from cloudtrain.errors import Unreachable
from cloudtrain.job.units import unix_time

CHUNK = 16 << 20  # bytes in one request of a resumable upload; a multiple of 256 KiB
ONE_REQUEST = 8 << 20  # bytes; up to here an upload is a single request
FIELDS = "name,size,md5Hash,crc32c,generation,updated"


class Bucket:
    """The objects of one bucket; every call blocks. Raises ApiError, Unreachable."""

    def __init__(self, api: GoogleApi, name: str) -> None:
        self._api, self.name = api, name

    def exists(self, name: str, size: int | None = None) -> bool:
        """Return whether an object exists, with that size if `size` is set."""
        failure = f"gs://{self.name}/{name} cannot be read"
        answer = self._api.call(
            "GET", "storage", self._object_path(name), failure, query={"fields": "size"}, accept=(404,)
        )
        if answer.status == 404:
            if b"bucket does not exist" in answer.data:  # the name of a bucket may have the word, too
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
            body={"contentType": content_type["Content-Type"], "md5Hash": _base64(digest(path, "md5"))},
            accept=(412,),
        )
        return session.status != 412 and self._upload_chunks(path, size, session.headers["location"], failure)

    def list_folders(self, prefix: str) -> Iterator[str]:
        """Yield the names directly below a prefix that have objects below them."""
        query = {"prefix": prefix, "delimiter": "/", "fields": "prefixes,nextPageToken", "maxResults": "1000"}
        while True:
            failure = f"gs://{self.name}/{prefix} cannot be listed"
            page = self._api.call("GET", "storage", f"/storage/v1/b/{quote(self.name)}/o", failure, query=query).json
            yield from (str(name)[len(prefix) : -1] for name in page.get("prefixes", ()))
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects below a prefix, named relative to it."""
        query = {"prefix": prefix, "fields": f"items({FIELDS}),nextPageToken", "maxResults": "1000"}
        while True:
            failure = f"gs://{self.name}/{prefix} cannot be listed"
            page = self._api.call("GET", "storage", f"/storage/v1/b/{quote(self.name)}/o", failure, query=query).json
            for item in page.get("items", ()):
                if (name := str(item["name"])[len(prefix) :]) and not name.endswith("/"):
                    yield self._stored(item, name)
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def read(self, name: str, condition: str = "", first: int = 0, last: int | None = None) -> Iterator[bytes]:
        """Yield an object in chunks, or its bytes from `first` to `last`."""
        failure = f"gs://{self.name}/{name} cannot be read"
        path = f"{self._object_path(name)}?alt=media{condition}"
        return self._api.stream("storage", path, failure, first, last)

    def download_prefix(self, prefix: str, into: Path) -> int:
        """Download all objects below a prefix into a folder, and return how many; equal files are not downloaded again.

        Raises BackendError, also for a name that would lead out of the folder, and DiskError.
        """
        return download_all(self.list_objects(prefix), into)

    def _stored(self, item: Mapping[str, Any], name: str) -> StoredObject:
        key, updated = str(item["name"]), item.get("updated")
        return StoredObject(
            name=name,
            uri=f"gs://{self.name}/{key}",
            size=int(item["size"]),
            version=str(item.get("generation", "")),
            modified_ns=int(unix_time(updated)) * 1_000_000_000 if updated else 0,
            read=partial(self._read_version, key, str(item.get("generation", ""))),
            verify=partial(_verify, item),
            refresh=partial(self._look_up, key, name),
        )

    def _look_up(self, key: str, name: str) -> StoredObject | None:
        failure = f"gs://{self.name}/{key} cannot be read"
        path, query = self._object_path(key), {"fields": FIELDS}
        answer = self._api.call("GET", "storage", path, failure, query=query, accept=(404,))
        return None if answer.status == 404 else self._stored(answer.json, name)

    def _read_version(self, key: str, generation: str, first: int, last: int) -> Iterator[bytes]:
        try:
            yield from self.read(key, f"&ifGenerationMatch={generation}" if generation else "", first, last)
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
        return f"/storage/v1/b/{quote(self.name)}/o/{quote(name, safe='')}"


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
