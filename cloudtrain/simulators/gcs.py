"""Cloud Storage's JSON API: objects with generations, preconditions, ranges, paging, resumable uploads; kept in a folder."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cloudtrain.simulators.http import Answer, Refusal, Request, Route

PAGE = 1000
Meta = dict[str, Any]


class Storage:
    """Buckets and objects; a bucket that is named for the first time by `create_bucket` or the API exists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._objects: dict[str, dict[str, Meta]] = {}
        self._sessions: dict[str, tuple[str, Meta, Mapping[str, str], Path]] = {}
        self._finished: dict[str, Meta] = {}  # uploads that are over, by their session
        self._generation = time.time_ns() // 1000
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*/*.json"):
            meta = json.loads(path.read_text())
            self._objects.setdefault(meta["bucket"], {})[meta["name"]] = meta
        for path in folder.iterdir():
            self._objects.setdefault(path.name, {})

    @property
    def routes(self) -> list[Route]:
        thing = r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)"
        return [
            ("GET", r"/storage/v1/b/([^/]+)", self._bucket),
            ("POST", r"/storage/v1/b", self._new_bucket),
            ("GET", r"/storage/v1/b/([^/]+)/o", self._list),
            ("GET", thing, self._get),
            ("DELETE", thing, self._delete),
            ("POST", r"/storage/v1/b/([^/]+)/o/([^/]+)/(?:copyTo|rewriteTo)/b/([^/]+)/o/([^/]+)", self._copy),
            ("POST", r"/upload/storage/v1/b/([^/]+)/o", self._upload),
            ("PUT", r"/upload/storage/v1/b/([^/]+)/o", self._continue),
        ]

    # -- from inside the process ---------------------------------------------------------------------------------------

    def create_bucket(self, bucket: str) -> None:
        with self._lock:
            (self._folder / bucket).mkdir(exist_ok=True)
            self._objects.setdefault(bucket, {})

    def put(self, bucket: str, name: str, data: bytes) -> Meta:
        """Write an object, whatever stands there."""
        part = self._part(bucket)
        part.write_bytes(data)
        return self._commit(bucket, {"name": name}, {}, part)

    def read(self, bucket: str, name: str) -> bytes:
        return self._data(self._find(bucket, name)).read_bytes()

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        with self._lock:
            return sorted(name for name in self._objects.get(bucket, {}) if name.startswith(prefix))

    # -- buckets and listings ------------------------------------------------------------------------------------------

    def _bucket(self, _: Request, bucket: str) -> Answer:
        self._known(bucket)
        return Answer(
            {"kind": "storage#bucket", "id": bucket, "name": bucket, "location": "US-CENTRAL1", "metageneration": "1"}
        )

    def _new_bucket(self, request: Request) -> Answer:
        name = str(request.json.get("name", ""))
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}", name):
            raise Refusal(400, f"Invalid bucket name: '{name}'")
        if name in self._objects:
            raise Refusal(409, "Your previous request to create the named bucket succeeded and you already own it.")
        self.create_bucket(name)
        return self._bucket(request, name)

    def _list(self, request: Request, bucket: str) -> Answer:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = _token(query["pageToken"]) if query.get("pageToken") else ""
        limit = min(int(query.get("maxResults") or PAGE), PAGE)
        with self._lock:
            found = self._known(bucket)
            items: list[Meta] = []
            prefixes: list[str] = []
            last = ""
            for name in sorted(found):
                if not name.startswith(prefix) or name < query.get("startOffset", ""):
                    continue
                if query.get("endOffset") and name >= query["endOffset"]:
                    continue
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                place = name[: cut + len(delimiter)] if cut >= 0 else name
                if place <= after or (prefixes and prefixes[-1] == place):
                    continue
                if len(items) + len(prefixes) == limit:
                    return Answer(_listing(items, prefixes, last))
                last = place
                if cut >= 0:
                    prefixes.append(place)
                else:
                    items.append(found[name])
        return Answer(_listing(items, prefixes, ""))

    # -- one object ----------------------------------------------------------------------------------------------------

    def _get(self, request: Request, bucket: str, name: str) -> Answer:
        with self._lock:
            meta = self._find(bucket, name)
            _check(request.query, meta)
            if request.query.get("alt") != "media":
                return Answer(meta)
            file = self._data(meta).open("rb")  # what is replaced meanwhile stays readable
        with file:
            size = int(meta["size"])
            headers = {
                "Content-Type": meta["contentType"],
                "X-Goog-Generation": meta["generation"],
                "X-Goog-Hash": f"md5={meta['md5Hash']}",
                "ETag": meta["etag"],
            }
            span = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
            if not span or not (span[1] or span[2]):
                return Answer(file.read(), headers=headers)
            first = int(span[1]) if span[1] else max(0, size - int(span[2]))
            last = min(int(span[2]) if span[1] and span[2] else size - 1, size - 1)
            if first >= size:
                return Answer(b"", 416, {"Content-Range": f"bytes */{size}"})
            file.seek(first)
            return Answer(
                file.read(last - first + 1), 206, {**headers, "Content-Range": f"bytes {first}-{last}/{size}"}
            )

    def _delete(self, request: Request, bucket: str, name: str) -> Answer:
        with self._lock:
            meta = self._find(bucket, name)
            _check(request.query, meta)
            del self._objects[bucket][name]
            self._remove(meta)
        return Answer(None, 204)

    def _copy(self, request: Request, bucket: str, name: str, other: str, target: str) -> Answer:
        meta = self.put(other, target, self.read(bucket, name))
        if "rewriteTo" not in request.path:
            return Answer(meta)
        return Answer({"kind": "storage#rewriteResponse", "done": True, "objectSize": meta["size"],
                       "totalBytesRewritten": meta["size"], "resource": meta})  # fmt: skip

    # -- uploads -------------------------------------------------------------------------------------------------------

    def _upload(self, request: Request, bucket: str) -> Answer:
        self._known(bucket)
        kind = request.query.get("uploadType")
        about: Meta = {"name": request.query.get("name", "")}
        if kind == "media":
            about["contentType"] = request.headers.get("content-type", "application/octet-stream")
            data = request.body
        elif kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', request.headers.get("content-type", ""))
            pieces = request.body.split(b"--" + boundary[1].encode()) if boundary else []
            if len(pieces) < 3:
                raise Refusal(400, "Malformed multipart body.")
            end = b"\r\n" if pieces[1].startswith(b"\r\n") else b"\n"  # gcsfs writes the latter
            first = pieces[1].partition(end * 2)[2]
            head, _, data = pieces[2].partition(end * 2)
            data = data[: -len(end)]  # before the next boundary
            about |= json.loads(first)
            kind_of_data = re.search(rb"(?i)content-type: *([^\r\n;]+)", head)
            about.setdefault("contentType", kind_of_data[1].decode() if kind_of_data else "")
        elif kind == "resumable":
            about |= request.json
            about.setdefault("contentType", request.headers.get("x-upload-content-type", "application/octet-stream"))
            with self._lock:
                _check(request.query, self._objects[bucket].get(about["name"]))
                word = f"{len(self._sessions)}-{self._next()}"
                self._sessions[word] = (bucket, about, dict(request.query), self._part(bucket))
            where = f"{request.base}/upload/storage/v1/b/{quote(bucket)}/o?uploadType=resumable&upload_id={word}"
            return Answer(b"", headers={"Location": where, "X-GUploader-UploadID": word})
        else:
            raise Refusal(400, f"Unknown upload type: {kind}")
        part = self._part(bucket)
        part.write_bytes(data)
        return Answer(self._commit(bucket, about, request.query, part))

    def _continue(self, request: Request, bucket: str) -> Answer:
        """Take a piece of a resumable upload, or say how far it has come."""
        done = self._finished.get(request.query.get("upload_id", ""))
        if done is not None:  # the answer that said so was lost
            return Answer(done)
        session = self._sessions.get(request.query.get("upload_id", ""))
        if session is None:
            raise Refusal(404, "No such upload session.")
        _, about, query, part = session
        at = part.stat().st_size if part.exists() else 0
        span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", request.headers.get("content-range", ""))
        if span is None or span[1] is not None:
            first = int(span[1]) if span else 0
            if first > at:
                raise Refusal(503, f"the next byte is {at}, not {first}")
            with part.open("ab") as file:
                file.write(request.body[at - first :])
                at = file.tell()
        total = span[3] if span else str(at)
        if total == "*" or at < int(total):
            return Answer(b"", 308, {"Range": f"bytes=0-{at - 1}"} if at else {})
        part.touch()
        meta = self._commit(bucket, about, query, part)
        self._finished[request.query["upload_id"]] = meta
        del self._sessions[request.query["upload_id"]]
        return Answer(meta)

    def _commit(self, bucket: str, about: Meta, query: Mapping[str, str], part: Path) -> Meta:
        """Make an object of what was received, if its preconditions hold."""
        digest, size = hashlib.md5(usedforsecurity=False), 0
        with part.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                size += len(piece)
        with self._lock:
            known = self._known(bucket)
            former = known.get(about["name"])
            try:
                _check(query, former)
            except Refusal:
                part.unlink()
                raise
            generation, now = self._next(), time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
            meta = {
                "kind": "storage#object",
                "id": f"{bucket}/{about['name']}/{generation}",
                "bucket": bucket,
                "name": about["name"],
                "generation": str(generation),
                "metageneration": "1",
                "contentType": about.get("contentType") or "application/octet-stream",
                "size": str(size),
                "md5Hash": base64.b64encode(digest.digest()).decode(),
                "etag": f"E{generation}",
                "storageClass": "STANDARD",
                "timeCreated": now,
                "updated": now,
                **({"metadata": about["metadata"]} if about.get("metadata") else {}),
            }
            part.replace(self._data(meta))
            self._data(meta).with_suffix(".json").write_text(json.dumps(meta))
            known[about["name"]] = meta
            if former is not None:
                self._remove(former)
        return meta

    # -- what lies where -----------------------------------------------------------------------------------------------

    def _known(self, bucket: str) -> dict[str, Meta]:
        if bucket not in self._objects:
            raise Refusal(404, "The specified bucket does not exist.")
        return self._objects[bucket]

    def _find(self, bucket: str, name: str) -> Meta:
        meta = self._known(bucket).get(name)
        if meta is None:
            raise Refusal(404, f"No such object: {bucket}/{name}")
        return meta

    def _data(self, meta: Meta) -> Path:
        return self._folder.joinpath(meta["bucket"], f"{meta['generation']}.data")

    def _remove(self, meta: Meta) -> None:
        for suffix in (".data", ".json"):
            self._data(meta).with_suffix(suffix).unlink(missing_ok=True)

    def _part(self, bucket: str) -> Path:
        self._known(bucket)
        return self._folder / bucket / f"{self._next()}.part"

    def _next(self) -> int:
        with self._lock:
            self._generation += 1
            return self._generation


def _check(query: Mapping[str, str], meta: Meta | None) -> None:
    """Hold an object to the preconditions of a request."""
    generation = meta["generation"] if meta else "0"
    if query.get("ifGenerationMatch") not in (None, "", generation):
        raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")
    if query.get("ifGenerationNotMatch") == generation:
        raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")
    if query.get("generation") not in (None, "", generation) and meta:
        raise Refusal(404, f"No such object: {meta['bucket']}/{meta['name']}#{query['generation']}")


def _listing(items: list[Meta], prefixes: list[str], last: str) -> Meta:
    found: Meta = {"kind": "storage#objects"}
    if items:
        found["items"] = items
    if prefixes:
        found["prefixes"] = prefixes
    if last:
        found["nextPageToken"] = base64.urlsafe_b64encode(last.encode()).decode()
    return found


def _token(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode()
    except (binascii.Error, ValueError):
        raise Refusal(400, "Invalid page token.") from None
