"""Objects of an Azure Blob Storage container, over its REST API. Sources: entrypoints/launcher/output/blob.py."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cloudtrain.backends import http
from cloudtrain.backends.azure import LOGIN, STORAGE, Tokens
from cloudtrain.backends.http import RETRYABLE, Answer, Http, HttpError
from cloudtrain.backends.store.download import ChangedError, StoredObject, digest
from cloudtrain.backends.store.files import Objects, bounded
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, BadRequest, Unreachable
from cloudtrain.source.node_code import module

ROLE = "Storage Blob Data Contributor"


class BlobError(HttpError):
    """Blob Storage refused a request."""


class BlobUnreachable(BlobError, Unreachable):
    """Blob Storage throttles or failed: the request may have been carried out."""


class Blob(Objects):
    """Objects at az://CONTAINER@ACCOUNT/prefix. Every call blocks; raises BlobError, Unreachable, MissingExtra."""

    def __init__(self, uri: str, tokens: Tokens | None = None, clock: Clock = SYSTEM) -> None:
        super().__init__(uri)
        self._node, self._tokens, self._clock = module("launcher.output.blob"), tokens or Tokens(clock), clock
        try:
            self._access = self._node.Access(self.bucket, os.environ, clock, partial(self._tokens.token, STORAGE))
        except ValueError as error:
            raise BadRequest(str(error)) from None
        self._http = Http(
            self._address, _error, lambda it: http.network_hint(str(it)), renew=self._access.renew, clock=clock
        )

    def check_credentials(self) -> None:
        self._access.request("")

    def folders(self) -> Iterator[str]:
        prefix = self._prefix("")
        for _, folders in self._pages(prefix, "/"):
            yield from (name[len(prefix) : -1] for name in folders)

    def read(self, name: str, most: int) -> bytes | None:
        try:
            return bounded(self._stream(name), most, f"{self.uri}/{name}")
        except BlobError as error:
            if error.status == 404:
                self._check_container(error)
                return None
            raise

    def add(self, name: str, data: bytes | Path) -> bool:
        """A large file is uploaded in blocks; it is there when all have come."""
        failure, path = f"az://{self.bucket}/{self.key(name)} cannot be written", self._path(name)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        if isinstance(data, Path) and self.look_up(name) is not None:
            return False
        if isinstance(data, bytes) or size <= self._node.PIECE:
            content = data if isinstance(data, bytes) else data.read_bytes()
            return self._put(path, failure, content, {"x-ms-blob-type": "BlockBlob"})
        ids = []
        with open(data, "rb") as file:
            for block, at, length in self._node.block_ids(size):
                file.seek(at)
                where = f"{path}?comp=block&blockid={quote(block, safe='')}"
                self._http.call("PUT", where, failure, data=file.read(length))
                ids.append(block)
        md5 = b64encode(digest(data, "md5")).decode()
        return self._put(f"{path}?comp=blocklist", failure, self._node.block_list(ids), {"x-ms-blob-content-md5": md5})

    def delete(self, name: str) -> None:
        failure = f"az://{self.bucket}/{self.key(name)} cannot be deleted"
        self._http.call("DELETE", self._path(name), failure, accept=(404,))

    def url(self, name: str, method: str, seconds: int) -> str:
        """Return a URL with which anybody reads (GET) or writes (PUT) one container's objects for some seconds.

        Raises BadRequest where the environment has no key of the account.
        """
        if not self._access._key:
            raise BadRequest(
                f"{self.uri} cannot be signed without the key of its account", "export AZURE_STORAGE_KEY=KEY"
            )
        until = self._clock.now() + seconds
        query = self._node.signature(self._access.account, self._access._key, until, {"GET": "r", "PUT": "cw"}[method])
        return f"{self._access.endpoint}/{self._path(name)}?{query}"

    def look_up(self, name: str) -> StoredObject | None:
        failure = f"az://{self.bucket}/{self.key(name)} cannot be read"
        answer = self._http.call("HEAD", self._path(name), failure, accept=(404,))
        if answer.status == 404:
            return None
        about = {_CASED[name]: value for name, value in answer.headers.items() if name in _CASED}
        key = self.key(name)
        return self._stored(self._node.entry(key, about), key.rpartition("/")[2])

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        for objects, _ in self._pages(prefix):
            yield from (self._stored(one, one["name"]) for one in objects)

    def _pages(self, prefix: str, delimiter: str = "") -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
        failure, marker = f"az://{self.bucket}/{prefix} cannot be listed", ""
        while True:
            path = self._node.list_path(self._access.container, prefix, marker, delimiter)
            objects, folders, marker = self._node.listing(self._http.call("GET", path, failure).data)
            yield objects, folders
            if not marker:
                return

    def _put(self, path: str, failure: str, data: bytes, headers: Mapping[str, str]) -> bool:
        """Write an object that does not exist. After a lost answer a retry finds its own: it counts as one that was there."""
        form = {"Content-Type": "application/octet-stream", "If-None-Match": "*", **headers}
        answer = self._http.call("PUT", path, failure, data=data, headers=form, accept=(409, 412))
        if answer.status < 300:
            return True
        if not self._node.is_taken(answer.status, answer.data.decode("utf-8", "replace")):
            raise _error(answer, failure)
        return False

    def _stream(
        self, name: str, headers: Mapping[str, str] | None = None, first: int = 0, last: int | None = None
    ) -> Iterator[bytes]:
        failure = f"az://{self.bucket}/{self.key(name)} cannot be read"
        return self._http.stream(self._path(name), failure, headers, first, last)

    def _stored(self, item: Mapping[str, Any], name: str) -> StoredObject:
        whole = Blob(f"az://{self.bucket}/{item['name']}", self._tokens, self._clock)
        etag = str(item["ETag"])
        return StoredObject(
            name=name,
            uri=whole.uri,
            size=item["size"],
            version=etag,
            modified_ns=item["modified"] * 1_000_000_000,
            read=partial(whole._read_version, etag),
            verify=lambda path: b64encode(digest(path, "md5")).decode() == item["md5"] if item["md5"] else None,
            refresh=partial(whole.look_up, ""),
        )

    def _read_version(self, etag: str, first: int, last: int) -> Iterator[bytes]:
        try:
            yield from self._stream("", {"If-Match": f'"{etag}"'}, first, last)
        except BlobError as error:
            if error.status in (404, 412):
                raise ChangedError from None
            raise

    def _check_container(self, error: BlobError) -> None:
        if "ContainerNotFound" in error.answer.data.decode("utf-8", "replace"):
            raise error

    def _path(self, name: str) -> str:
        return f"{self._access.container}/{quote(self.key(name))}"

    def _address(self, path: str) -> tuple[str, Mapping[str, str]]:
        try:
            url, headers = self._access.request(path)
        except ValueError:
            raise BackendError(
                "AZURE_STORAGE_KEY is not the key of a storage account", "copy it from the portal: Access keys"
            ) from None
        return url, headers


_CASED = {
    "content-length": "Content-Length",
    "etag": "ETag",
    "content-md5": "Content-MD5",
    "last-modified": "Last-Modified",
}


def _error(answer: Answer, failure: str) -> BlobError:
    """Return the error of an answer: its code is in a header, or in the XML of its body."""
    text = answer.data.decode("utf-8", "replace")
    found = re.search(r"<Code>(\w+)</Code>", text)
    code = answer.headers.get("x-ms-error-code") or (found[1] if found else "")
    hint = "try again in some minutes" if answer.status in RETRYABLE or answer.status >= 500 else ""
    if answer.status == 404 and code == "ContainerNotFound":
        hint = "create the container: az storage container create, or correct the address"
    elif code == "AuthorizationPermissionMismatch" or answer.status == 403:
        hint = f"grant yourself {ROLE} on the container, or set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN"
    elif answer.status == 401:
        hint = LOGIN
    kind = BlobUnreachable if answer.status in RETRYABLE or answer.status >= 500 else BlobError
    return kind(f"{failure}: {code or 'no reason was given'} ({answer.status})", hint, answer)
