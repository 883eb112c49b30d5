"""Simulates Cloud Storage's JSON API in a folder: generations, preconditions, ranges, paging, resumable uploads."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cloudtrain.clock import SYSTEM
from cloudtrain.simulators.http import ApiError, Request, Response, Route

PAGE = 1000
Metadata = dict[str, Any]


class Storage:
    """Buckets and objects, stored as files; `create_bucket` or the API creates a bucket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._objects: dict[str, dict[str, Metadata]] = {}
        self._sessions: dict[str, tuple[str, Metadata, Mapping[str, str], Path]] = {}
        self._finished: dict[str, Metadata] = {}  # finished uploads, by their session
        self._generation = int(SYSTEM.now() * 1e9) // 1000
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*/*.json"):
            meta = json.loads(path.read_text())
            self._objects.setdefault(meta["bucket"], {})[meta["name"]] = meta
        for path in folder.iterdir():
            self._objects.setdefault(path.name, {})

    @property
    def routes(self) -> list[Route]:
        one_object = r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)"
        return [
            ("GET", r"/storage/v1/b/([^/]+)", self._bucket),
            ("POST", r"/storage/v1/b", self._new_bucket),
            ("GET", r"/storage/v1/b/([^/]+)/o", self._list),
            ("GET", one_object, self._get),
            ("DELETE", one_object, self._delete),
            ("POST", r"/storage/v1/b/([^/]+)/o/([^/]+)/(?:copyTo|rewriteTo)/b/([^/]+)/o/([^/]+)", self._copy),
            ("POST", r"/upload/storage/v1/b/([^/]+)/o", self._upload),
            ("PUT", r"/upload/storage/v1/b/([^/]+)/o", self._continue),
        ]

    # -- Python API ---------------------------------------------------------------------------------------

    def has_bucket(self, name: str) -> bool:
        with self._lock:
            return name in self._objects

    def create_bucket(self, bucket: str) -> None:
        with self._lock:
            (self._folder / bucket).mkdir(exist_ok=True)
            self._objects.setdefault(bucket, {})

    def put(self, bucket: str, name: str, data: bytes) -> Metadata:
        """Write an object, without preconditions."""
        part = self._new_upload_path(bucket)
        part.write_bytes(data)
        return self._commit(bucket, {"name": name}, {}, part)

    def read(self, bucket: str, name: str) -> bytes:
        return self._data_path(self._find(bucket, name)).read_bytes()

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        with self._lock:
            return sorted(name for name in self._objects.get(bucket, {}) if name.startswith(prefix))

    # -- buckets and listings ------------------------------------------------------------------------------------------

    def _bucket(self, _: Request, bucket: str) -> Response:
        self._bucket_objects(bucket)
        return Response(
            {"kind": "storage#bucket", "id": bucket, "name": bucket, "location": "US-CENTRAL1", "metageneration": "1"}
        )

    def _new_bucket(self, request: Request) -> Response:
        name = str(request.json.get("name", ""))
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}", name):
            raise ApiError(400, f"Invalid bucket name: '{name}'")
        if name in self._objects:
            raise ApiError(409, "Your previous request to create the named bucket succeeded and you already own it.")
        self.create_bucket(name)
        return self._bucket(request, name)

    def _list(self, request: Request, bucket: str) -> Response:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = _parse_page_token(query["pageToken"]) if query.get("pageToken") else ""
        limit = min(int(query.get("maxResults") or PAGE), PAGE)
        with self._lock:
            objects = self._bucket_objects(bucket)
            items: list[Metadata] = []
            prefixes: list[str] = []
            last = ""
            for name in sorted(objects):
                if not name.startswith(prefix) or name < query.get("startOffset", ""):
                    continue
                if query.get("endOffset") and name >= query["endOffset"]:
                    continue
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                entry = name[: cut + len(delimiter)] if cut >= 0 else name
                if entry <= after or (prefixes and prefixes[-1] == entry):
                    continue
                if len(items) + len(prefixes) == limit:
                    return Response(_listing(items, prefixes, last))
                last = entry
                if cut >= 0:
                    prefixes.append(entry)
                else:
                    items.append(objects[name])
        return Response(_listing(items, prefixes, ""))

    # -- one object ----------------------------------------------------------------------------------------------------

    def _get(self, request: Request, bucket: str, name: str) -> Response:
        with self._lock:
            meta = self._find(bucket, name)
            _check_preconditions(request.query, meta)
            if request.query.get("alt") != "media":
                return Response(meta)
            file = self._data_path(meta).open("rb")  # stays readable when the object is replaced
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
                return Response(file.read(), headers=headers)
            first = int(span[1]) if span[1] else max(0, size - int(span[2]))
            last = min(int(span[2]) if span[1] and span[2] else size - 1, size - 1)
            if first >= size:
                return Response(b"", 416, {"Content-Range": f"bytes */{size}"})
            file.seek(first)
            return Response(
                file.read(last - first + 1), 206, {**headers, "Content-Range": f"bytes {first}-{last}/{size}"}
            )

    def _delete(self, request: Request, bucket: str, name: str) -> Response:
        with self._lock:
            meta = self._find(bucket, name)
            _check_preconditions(request.query, meta)
            del self._objects[bucket][name]
            self._remove(meta)
        return Response(None, 204)

    def _copy(self, request: Request, bucket: str, name: str, other: str, target: str) -> Response:
        meta = self.put(other, target, self.read(bucket, name))
        if "rewriteTo" not in request.path:
            return Response(meta)
        return Response({"kind": "storage#rewriteResponse", "done": True, "objectSize": meta["size"],
                       "totalBytesRewritten": meta["size"], "resource": meta})  # fmt: skip

    # -- uploads -------------------------------------------------------------------------------------------------------

    def _upload(self, request: Request, bucket: str) -> Response:
        self._bucket_objects(bucket)
        kind = request.query.get("uploadType")
        fields: Metadata = {"name": request.query.get("name", "")}
        if kind == "media":
            fields["contentType"] = request.headers.get("content-type", "application/octet-stream")
            data = request.body
        elif kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', request.headers.get("content-type", ""))
            pieces = request.body.split(b"--" + boundary[1].encode()) if boundary else []
            if len(pieces) < 3:
                raise ApiError(400, "Malformed multipart body.")
            end = b"\r\n" if pieces[1].startswith(b"\r\n") else b"\n"  # gcsfs writes the latter
            first = pieces[1].partition(end * 2)[2]
            head, _, data = pieces[2].partition(end * 2)
            data = data[: -len(end)]  # before the next boundary
            fields |= json.loads(first)
            kind_of_data = re.search(rb"(?i)content-type: *([^\r\n;]+)", head)
            fields.setdefault("contentType", kind_of_data[1].decode() if kind_of_data else "")
        elif kind == "resumable":
            fields |= request.json
            fields.setdefault("contentType", request.headers.get("x-upload-content-type", "application/octet-stream"))
            with self._lock:
                _check_preconditions(request.query, self._objects[bucket].get(fields["name"]))
                upload_id = f"{len(self._sessions)}-{self._next_generation()}"
                self._sessions[upload_id] = (bucket, fields, dict(request.query), self._new_upload_path(bucket))
            location = (
                f"{request.base}/upload/storage/v1/b/{quote(bucket)}/o?uploadType=resumable&upload_id={upload_id}"
            )
            return Response(b"", headers={"Location": location, "X-GUploader-UploadID": upload_id})
        else:
            raise ApiError(400, f"Unknown upload type: {kind}")
        part = self._new_upload_path(bucket)
        part.write_bytes(data)
        return Response(self._commit(bucket, fields, request.query, part))

    def _continue(self, request: Request, bucket: str) -> Response:
        """Append a chunk to a resumable upload, or report its progress."""
        finished = self._finished.get(request.query.get("upload_id", ""))
        if finished is not None:  # its response was lost
            return Response(finished)
        session = self._sessions.get(request.query.get("upload_id", ""))
        if session is None:
            raise ApiError(404, "No such upload session.")
        _, fields, query, part = session
        received = part.stat().st_size if part.exists() else 0
        span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", request.headers.get("content-range", ""))
        if span is None or span[1] is not None:
            first = int(span[1]) if span else 0
            if first > received:
                raise ApiError(503, f"the next byte is {received}, not {first}")
            with part.open("ab") as file:
                file.write(request.body[received - first :])
                received = file.tell()
        total = span[3] if span else str(received)
        if total == "*" or received < int(total):
            return Response(b"", 308, {"Range": f"bytes=0-{received - 1}"} if received else {})
        part.touch()
        meta = self._commit(bucket, fields, query, part)
        self._finished[request.query["upload_id"]] = meta
        del self._sessions[request.query["upload_id"]]
        return Response(meta)

    def _commit(self, bucket: str, fields: Metadata, query: Mapping[str, str], part: Path) -> Metadata:
        """Create an object from an upload, if its preconditions hold."""
        digest, size = hashlib.md5(usedforsecurity=False), 0
        with part.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                size += len(piece)
        md5 = base64.b64encode(digest.digest()).decode()
        if fields.get("md5Hash", md5) != md5:
            part.unlink()
            raise ApiError(400, f'Provided MD5 hash "{fields["md5Hash"]}" doesn\'t match calculated MD5 hash "{md5}".')
        with self._lock:
            objects = self._bucket_objects(bucket)
            former = objects.get(fields["name"])
            try:
                _check_preconditions(query, former)
            except ApiError:
                part.unlink()
                raise
            generation, now = self._next_generation(), SYSTEM.utc().strftime("%Y-%m-%dT%H:%M:%S.000Z")
            meta = {
                "kind": "storage#object",
                "id": f"{bucket}/{fields['name']}/{generation}",
                "bucket": bucket,
                "name": fields["name"],
                "generation": str(generation),
                "metageneration": "1",
                "contentType": fields.get("contentType") or "application/octet-stream",
                "size": str(size),
                "md5Hash": md5,
                "etag": f"E{generation}",
                "storageClass": "STANDARD",
                "timeCreated": now,
                "updated": now,
                **({"metadata": fields["metadata"]} if fields.get("metadata") else {}),
            }
            part.replace(self._data_path(meta))
            self._data_path(meta).with_suffix(".json").write_text(json.dumps(meta))
            objects[fields["name"]] = meta
            if former is not None:
                self._remove(former)
        return meta

    # -- files -----------------------------------------------------------------------------------------------

    def _bucket_objects(self, bucket: str) -> dict[str, Metadata]:
        if bucket not in self._objects:
            raise ApiError(404, "The specified bucket does not exist.")
        return self._objects[bucket]

    def _find(self, bucket: str, name: str) -> Metadata:
        meta = self._bucket_objects(bucket).get(name)
        if meta is None:
            raise ApiError(404, f"No such object: {bucket}/{name}")
        return meta

    def _data_path(self, meta: Metadata) -> Path:
        return self._folder.joinpath(meta["bucket"], f"{meta['generation']}.data")

    def _remove(self, meta: Metadata) -> None:
        for suffix in (".data", ".json"):
            self._data_path(meta).with_suffix(suffix).unlink(missing_ok=True)

    def _new_upload_path(self, bucket: str) -> Path:
        self._bucket_objects(bucket)
        return self._folder / bucket / f"{self._next_generation()}.part"

    def _next_generation(self) -> int:
        with self._lock:
            self._generation += 1
            return self._generation


def _check_preconditions(query: Mapping[str, str], meta: Metadata | None) -> None:
    """Raise ApiError unless an object meets the preconditions of a request."""
    generation = meta["generation"] if meta else "0"
    if query.get("ifGenerationMatch") not in (None, "", generation):
        raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")
    if query.get("ifGenerationNotMatch") == generation:
        raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")
    if query.get("generation") not in (None, "", generation) and meta:
        raise ApiError(404, f"No such object: {meta['bucket']}/{meta['name']}#{query['generation']}")


def _listing(items: list[Metadata], prefixes: list[str], last: str) -> Metadata:
    listing: Metadata = {"kind": "storage#objects"}
    if items:
        listing["items"] = items
    if prefixes:
        listing["prefixes"] = prefixes
    if last:
        listing["nextPageToken"] = base64.urlsafe_b64encode(last.encode()).decode()
    return listing


def _parse_page_token(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode()
    except (binascii.Error, ValueError):
        raise ApiError(400, "Invalid page token.") from None
