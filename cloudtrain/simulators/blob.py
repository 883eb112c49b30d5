"""Simulates Azure Blob Storage in memory: conditional writes, blocks, ranges, paged listings, account SAS.

Addresses are those of Azurite: http://HOST/ACCOUNT/CONTAINER/NAME. The tests of its clients run against Azurite too.
"""

from __future__ import annotations

import base64
import calendar
import hashlib
import hmac
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import unquote, urlencode
from xml.sax.saxutils import escape

from cloudtrain.clock import SYSTEM
from cloudtrain.simulators.http import ApiError, Request, Response, Route

ACCOUNT, KEY = "devstoreaccount1", base64.b64encode(b"the key of the simulated account").decode()
PAGE = 5000


class BlobApiError(ApiError):
    """An error of Blob Storage: its code is in a header and in the XML."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)

    @property
    def response(self) -> Response:
        body = f'<?xml version="1.0"?><Error><Code>{self.message}</Code><Message>{self.message}</Message></Error>'
        headers = {"Content-Type": "application/xml", "x-ms-error-code": self.message}
        return Response(body.encode(), self.status, headers)


@dataclass
class _Object:
    data: bytes
    md5: str
    etag: str
    at: str

    @property
    def headers(self) -> dict[str, str]:
        return {"ETag": f'"{self.etag}"', "Last-Modified": self.at, "Content-MD5": self.md5,
                "Content-Type": "application/octet-stream", "x-ms-blob-type": "BlockBlob"}  # fmt: skip


@dataclass
class BlobService:
    """Containers of one account; `page` objects are on a page of a listing."""

    page: int = PAGE
    containers: dict[str, dict[str, _Object]] = field(default_factory=dict)
    _blocks: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _count: int = 0

    @property
    def routes(self) -> list[Route]:
        one = rf"/{ACCOUNT}/([^/]+)/(.+)"
        return [
            ("PUT", rf"/{ACCOUNT}/([^/]+)", self._create),
            ("GET", rf"/{ACCOUNT}/([^/]+)", self._list),
            ("PUT", one, self._put),
            ("GET", one, self._get),
            ("HEAD", one, self._get),
            ("DELETE", one, self._delete),
        ]

    def connection(self, url: str) -> str:
        """Return the connection string of the account on a server."""
        return f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url}/{ACCOUNT};"

    def signed(self, seconds: int = 3600) -> str:
        """Return an account SAS that reads and lists for so long."""
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(SYSTEM.now() + seconds))
        asked = {"sp": "rl", "ss": "b", "srt": "sco", "se": ends, "sv": "2021-12-02"}
        return urlencode({**asked, "sig": _signature(asked)})

    def write(self, container: str, name: str, data: bytes) -> None:
        """Write an object, as a service beside the account does."""
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        with self._lock:
            self._count += 1
            at = formatdate(SYSTEM.now(), usegmt=True)
            self.containers.setdefault(container, {})[name] = _Object(data, md5, f"0x{self._count:X}", at)

    def objects(self, container: str) -> dict[str, bytes]:
        with self._lock:
            return {name: one.data for name, one in self.containers[container].items()}

    def _create(self, request: Request, container: str) -> Response:
        _authorize(request)
        with self._lock:
            if container in self.containers:
                raise BlobApiError(409, "ContainerAlreadyExists")
            self.containers[container] = {}
        return Response(b"", 201)

    def _list(self, request: Request, container: str) -> Response:
        _authorize(request)
        query = request.query
        prefix, delimiter, after = query.get("prefix", ""), query.get("delimiter", ""), query.get("marker", "")
        rows: list[str] = []
        folders: set[str] = set()
        last = ""
        with self._lock:
            for name, one in sorted(self._container(container).items()):
                if not name.startswith(prefix) or name <= after:
                    continue
                if len(rows) + len(folders) == self.page:
                    break
                last = name
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                if cut >= 0:
                    folders.add(name[: cut + 1])
                    last = name[: cut + 1] + chr(0x10FFFF)  # the next page begins behind the folder
                    continue
                about = {
                    "Last-Modified": one.at,
                    "Etag": one.etag,
                    "Content-Length": len(one.data),
                    "Content-MD5": one.md5,
                    "BlobType": "BlockBlob",
                }
                fields = "".join(f"<{tag}>{value}</{tag}>" for tag, value in about.items())
                rows.append(f"<Blob><Name>{escape(name)}</Name><Properties>{fields}</Properties></Blob>")
            else:
                last = ""
        rows += [f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in sorted(folders)]
        marker = f"<NextMarker>{escape(last)}</NextMarker>"
        xml = f"<EnumerationResults><Blobs>{''.join(rows)}</Blobs>{marker}</EnumerationResults>"
        return Response(xml.encode(), 200, {"Content-Type": "application/xml"})

    def _put(self, request: Request, container: str, name: str) -> Response:
        _authorize(request)
        kind, md5 = request.query.get("comp", ""), request.headers.get("x-ms-blob-content-md5", "")
        with self._lock:
            objects, blocks = self._container(container), self._blocks.setdefault((container, name), {})
            if kind == "block":
                blocks[request.query["blockid"]] = request.body
                return Response(b"", 201)
            if request.headers.get("if-none-match") == "*" and name in objects:
                raise BlobApiError(409, "BlobAlreadyExists")
            data = request.body
            if kind == "blocklist":
                wanted = re.findall(r"<Latest>([^<]+)</Latest>", request.body.decode())
                if not blocks.keys() >= set(wanted):
                    raise BlobApiError(400, "InvalidBlockList")
                data = b"".join(blocks[one] for one in wanted)
            elif request.headers.get("x-ms-blob-type") != "BlockBlob":
                raise BlobApiError(400, "MissingRequiredHeader")
            else:
                md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
            del self._blocks[container, name]
            self._count += 1
            objects[name] = _Object(data, md5, f"0x{self._count:X}", formatdate(SYSTEM.now(), usegmt=True))
            return Response(b"", 201, objects[name].headers)

    def _get(self, request: Request, container: str, name: str) -> Response:
        _authorize(request)
        with self._lock:
            one = self._find(container, name)
        wanted = request.headers.get("if-match", "").strip('"')
        if wanted not in ("", one.etag):
            raise BlobApiError(412, "ConditionNotMet")
        if request.method == "HEAD":
            return Response(b"", 200, {**one.headers, "Content-Length": str(len(one.data))})
        asked = request.headers.get("x-ms-range") or request.headers.get("range", "")
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        if not span:
            return Response(one.data, 200, one.headers)
        first, last = int(span[1]), min(int(span[2] or len(one.data)), len(one.data) - 1)
        if first >= len(one.data):
            raise BlobApiError(416, "InvalidRange")
        return Response(
            one.data[first : last + 1], 206, {**one.headers, "Content-Range": f"bytes {first}-{last}/{len(one.data)}"}
        )

    def _delete(self, request: Request, container: str, name: str) -> Response:
        _authorize(request)
        with self._lock:
            self._find(container, name)
            del self.containers[container][name]
        return Response(b"", 202)

    def _container(self, container: str) -> dict[str, _Object]:
        if container not in self.containers:
            raise BlobApiError(404, "ContainerNotFound")
        return self.containers[container]

    def _find(self, container: str, name: str) -> _Object:
        found = self._container(container).get(name)
        if found is None:
            raise BlobApiError(404, "BlobNotFound")
        return found


def _signature(asked: Mapping[str, str]) -> str:
    order = ("sp", "ss", "srt", "st", "se", "sip", "spr", "sv", "ses")
    text = "\n".join([ACCOUNT, *(asked.get(name, "") for name in order), ""])
    digest = hmac.new(base64.b64decode(KEY), unquote(text).encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()


def _authorize(request: Request) -> None:
    """Raise BlobApiError unless a request has an account SAS that the key has signed."""
    asked: Mapping[str, str] = request.query
    ends = time.strptime(asked.get("se", "1970-01-01T00:00:00Z"), "%Y-%m-%dT%H:%M:%SZ")
    allowed = {"GET": "r", "HEAD": "r", "DELETE": "d", "PUT": "w"}[request.method]
    if calendar.timegm(ends) < SYSTEM.now() or allowed not in asked.get("sp", ""):
        raise BlobApiError(403, "AuthenticationFailed")
    if not hmac.compare_digest(_signature(asked), asked.get("sig", "")):
        raise BlobApiError(403, "AuthenticationFailed")
