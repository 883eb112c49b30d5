"""Azure Blob Storage client of the standard library: az://CONTAINER@ACCOUNT/NAME, for nodes and for cloudtrain itself.

`Files` has as much of fsspec's interface as store.py uses. Without @ACCOUNT it is the one of the environment. Credentials, in
this order: AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_SAS_TOKEN, AZURE_STORAGE_KEY of AZURE_STORAGE_ACCOUNT (the names of
the Azure CLI), a service principal or workload identity (AZURE_TENANT_ID, AZURE_CLIENT_ID with AZURE_CLIENT_SECRET or
AZURE_FEDERATED_TOKEN_FILE), and the managed identity of the machine.

Requests: the Blob service's REST API, version 2021-12-02. A key signs an account SAS, which goes with every request:
azure-storage-blob 12.31, _shared/shared_access_signature.py. Managed identities: azure-identity 1.27, _credentials/azure_ml.py
and imds.py (2026-11-30).
"""

from __future__ import annotations

import base64
import calendar
import errno
import hashlib
import hmac
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from xml.etree import ElementTree

from ..clock import SYSTEM, Clock
from .gcs import download, send

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

VERSION = "2021-12-02"
STORAGE = "https://storage.azure.com/"  # whom a token is for
IMDS = "http://169.254.169.254/metadata/identity/oauth2/token"
LOGIN = "https://login.microsoftonline.com"
ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
SAS_S = 86400  # how long a signature of ours is valid
PIECE = 32 << 20  # bytes in one request
MOST_BLOCKS = 40_000  # of an object; the service takes 50,000
TRIES = 6
LATER = (408, 429, 500, 502, 503, 504)  # the same request may work later


class Access:
    """How the containers of one account are reached: an address, and what goes with each request.

    Args:
        place: CONTAINER@ACCOUNT, or CONTAINER for the environment's account.
        token: returns an access token and the seconds for which it is valid, where the environment has no key and no SAS.
    """

    def __init__(
        self,
        place: str,
        environ: Mapping[str, str],
        clock: Clock = SYSTEM,
        token: Callable[[], tuple[str, float]] | None = None,
    ) -> None:
        self._clock, self._ask_token = clock, token or (lambda: node_token(environ))
        parts = dict(
            part.split("=", 1) for part in environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";") if "=" in part
        )
        known = (
            parts.get("AccountName")
            or environ.get("AZURE_STORAGE_ACCOUNT")
            or environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        )
        self.container, _, account = place.partition("@")
        self.account = account.partition(".")[0] or known or ""
        if not self.account:
            raise ValueError(
                f"az://{place} names no storage account: write az://{place}@ACCOUNT, or set AZURE_STORAGE_ACCOUNT"
            )
        own = parts if parts.get("AccountName", self.account) == self.account else {}
        suffix = own.get("EndpointSuffix") or "core.windows.net"
        self.endpoint = (own.get("BlobEndpoint") or f"https://{self.account}.blob.{suffix}").rstrip("/")
        mine = not known or known == self.account  # a key and a SAS are of one account
        key = environ.get("AZURE_STORAGE_KEY") or environ.get("AZURE_STORAGE_ACCOUNT_KEY") or ""
        self._key = own.get("AccountKey") or (key if mine else "")
        sas = own.get("SharedAccessSignature") or (environ.get("AZURE_STORAGE_SAS_TOKEN", "") if mine else "")
        self._sas = sas.lstrip("?")
        self._token, self._valid_until = "", 0.0
        self._lock = threading.Lock()

    def request(self, path: str) -> tuple[str, dict[str, str]]:
        """Return the URL of CONTAINER/NAME?QUERY and the headers that it needs; blocking where a token is asked for."""
        headers, query = {"x-ms-version": VERSION}, self._sas
        if not query and self._key:
            query = signature(self.account, self._key, self._clock.now() + SAS_S)
        elif not query:
            headers["Authorization"] = f"Bearer {self._bearer()}"
        mark = "&" if "?" in path else "?"
        return f"{self.endpoint}/{path}" + (mark + query if query else ""), headers

    def renew(self) -> bool:
        """Drop a token that was not accepted; return whether there may be another one."""
        with self._lock:
            had, self._token = bool(self._token), ""
        return had

    def _bearer(self) -> str:
        with self._lock:
            if not self._token or self._clock.monotonic() >= self._valid_until:
                self._token, seconds = self._ask_token()
                self._valid_until = self._clock.monotonic() + max(0.0, seconds - 120)
            return self._token


def signature(account: str, key: str, until: float, permissions: str = "rwdlac") -> str:
    """Return the query of an account SAS for the Blob service. Raises ValueError for a key that is none."""
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(until))
    text = "\n".join((account, permissions, "b", "sco", "", end, "", "", VERSION, "", ""))
    digest = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
    values = {
        "sv": VERSION,
        "ss": "b",
        "srt": "sco",
        "sp": permissions,
        "se": end,
        "sig": base64.b64encode(digest).decode(),
    }
    return urllib.parse.urlencode(values)


def node_token(environ: Mapping[str, str], resource: str = STORAGE, what: str = "Blob Storage") -> tuple[str, float]:
    """Return a token of a service principal, or of this machine, and the seconds for which it is valid; blocking.

    `resource` is the address that it is for, and `what` the service's name for messages. Raises OSError.
    """
    client, tenant = environ.get("AZURE_CLIENT_ID", ""), environ.get("AZURE_TENANT_ID", "")
    secret, file = environ.get("AZURE_CLIENT_SECRET", ""), environ.get("AZURE_FEDERATED_TOKEN_FILE", "")
    if client and tenant and (secret or file):
        form = {"grant_type": "client_credentials", "client_id": client, "scope": resource + ".default"}
        if secret:
            form["client_secret"] = secret
        else:
            with open(file, encoding="utf-8") as assertion:
                form.update(client_assertion_type=ASSERTION, client_assertion=assertion.read().strip())
        login = (environ.get("AZURE_AUTHORITY_HOST") or LOGIN).rstrip("/")
        grant = _json(f"{login}/{tenant}/oauth2/v2.0/token", {}, urllib.parse.urlencode(form).encode(), what)
        return grant["access_token"], float(grant["expires_in"])
    client = client or environ.get("DEFAULT_IDENTITY_CLIENT_ID", "")
    query = {"resource": resource, "api-version": "2018-02-01"}
    where, headers = IMDS, {"Metadata": "true"}
    if environ.get("MSI_ENDPOINT") and environ.get("MSI_SECRET"):  # a node of Azure Machine Learning
        where, headers, query["api-version"] = environ["MSI_ENDPOINT"], {"secret": environ["MSI_SECRET"]}, "2017-09-01"
        query.update({"clientid": client} if client else {})
    elif client:
        query["client_id"] = client
    grant = _json(f"{where}?{urllib.parse.urlencode(query)}", headers, None, what)
    ends = str(grant.get("expires_on", ""))
    return grant["access_token"], float(ends) - SYSTEM.now() if ends.isdigit() else float(
        grant.get("expires_in") or 300
    )


def _json(url: str, headers: Mapping[str, str], data: bytes | None, what: str) -> Any:
    request = urllib.request.Request(url, data, dict(headers))
    try:
        with send(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            text = " ".join(error.read().decode("utf-8", "replace").split())[:200]
        raise PermissionError(errno.EACCES, f"no token for {what}: {error.code} {text}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        where = urllib.parse.urlsplit(url).netloc
        raise PermissionError(errno.EACCES, f"no credentials for {what}, and no token from {where}: {error}") from None


def listing(xml: bytes) -> tuple[list[dict[str, Any]], list[str], str]:
    """Return the objects, the folders and the next marker of a page of List Blobs."""
    root = ElementTree.fromstring(xml)
    objects = []
    for blob in root.iterfind("Blobs/Blob"):
        about = {field.tag: field.text or "" for field in blob.iterfind("Properties/*")}
        if about.get("ResourceType") != "directory":  # of an account with a hierarchical namespace
            objects.append(entry(_name(blob), about))
    return objects, [_name(prefix) for prefix in root.iterfind("Blobs/BlobPrefix")], root.findtext("NextMarker") or ""


def entry(name: str, about: Mapping[str, str]) -> dict[str, Any]:
    """Return what is known of an object by its properties; a header has quotes round the ETag, a listing has none."""
    size, etag = int(about["Content-Length"]), (about.get("ETag") or about.get("Etag") or "").strip('"')
    return {"name": name, "type": "file", "size": size, "ETag": etag, "md5": about.get("Content-MD5", ""),
            "modified": modified(about.get("Last-Modified", ""))}  # fmt: skip


def modified(text: str) -> int:
    """Return the seconds since 1970 of an HTTP date, 0 for none."""
    try:
        return calendar.timegm(time.strptime(text, "%a, %d %b %Y %H:%M:%S GMT"))
    except ValueError:
        return 0


def _name(element: Any) -> str:
    found = element.find("Name")
    text = found.text or ""
    return urllib.parse.unquote(text) if found.get("Encoded") == "true" else text


def list_path(container: str, prefix: str, marker: str = "", delimiter: str = "") -> str:
    """Return the path of a page of List Blobs."""
    query = {"restype": "container", "comp": "list", "prefix": prefix, "maxresults": "5000"}
    query.update({"marker": marker} if marker else {})
    query.update({"delimiter": delimiter} if delimiter else {})
    return f"{container}?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)}"


def block_ids(size: int) -> Iterator[tuple[str, int, int]]:
    """Yield id, first byte and bytes of the blocks in which a large file is uploaded."""
    each = max(PIECE, -(-size // MOST_BLOCKS))
    for number in range(-(-size // each)):
        yield base64.b64encode(b"%08d" % number).decode(), number * each, min(each, size - number * each)


def block_list(ids: list[str]) -> bytes:
    """Return the body of Put Block List."""
    return ("<BlockList>" + "".join(f"<Latest>{one}</Latest>" for one in ids) + "</BlockList>").encode()


def is_taken(status: int, body: str) -> bool:
    """Return whether an answer to a conditional write says that the object exists."""
    return status == 412 or (status == 409 and "BlobAlreadyExists" in body)


class Files:
    """Objects by "CONTAINER@ACCOUNT/NAME"; every call blocks. Raises OSError, FileNotFoundError where there is no such thing."""

    def __init__(self, place: str, clock: Clock = SYSTEM) -> None:
        self._clock, self._place = clock, place
        self._access = Access(place, os.environ, clock)

    def info(self, path: str) -> dict[str, Any]:
        head = self._ask("HEAD", self._object(path))[0]
        return entry(path, {"Content-Length": head["content-length"], "ETag": head.get("etag", ""),
                            "Content-MD5": head.get("content-md5", "")})  # fmt: skip

    def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        """Return all objects below a folder, by their paths."""
        found, marker = {}, ""
        while True:
            page = self._ask("GET", list_path(self._access.container, path.partition("/")[2], marker))[1]
            objects, _folders, marker = listing(page)
            found.update({f"{self._place}/{one['name']}": one for one in objects})
            if not marker:
                return found

    def cat_file(self, path: str) -> bytes:
        return self._ask("GET", self._object(path))[1]

    def get_file(self, path: str, target: str) -> None:
        """Copy an object into a file."""

        def read(info: Mapping[str, Any], first: int, last: int) -> bytes:
            span = {"Range": f"bytes={first}-{last}", "If-Match": f'"{info["ETag"]}"'}
            return self._ask("GET", self._object(path), span)[1]

        download(lambda: self.info(path), read, target, PIECE)

    def put_file(self, path: str, target: str) -> None:
        """Copy a file; the object is replaced at once, when all of it has come."""
        digest, ids = hashlib.md5(usedforsecurity=False), []
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= PIECE:
                self.pipe_file(target, file.read())
                return
            for block, at, length in block_ids(size):
                file.seek(at)
                piece = file.read(length)
                if len(piece) < length:
                    raise OSError(errno.EIO, "the file became shorter while it was uploaded")
                digest.update(piece)
                where = f"{self._object(target)}?comp=block&blockid={urllib.parse.quote(block, safe='')}"
                self._ask("PUT", where, {}, piece)
                ids.append(block)
        md5 = base64.b64encode(digest.digest()).decode()
        where = f"{self._object(target)}?comp=blocklist"
        self._ask("PUT", where, {"x-ms-blob-content-md5": md5}, block_list(ids))

    def pipe_file(self, target: str, data: bytes, mode: str = "overwrite") -> None:
        """Write an object; with mode create only where there is none."""
        condition = {"If-None-Match": "*"} if mode == "create" else {}
        self._ask("PUT", self._object(target), {"x-ms-blob-type": "BlockBlob", **condition}, data)

    def rm_file(self, path: str) -> None:
        self._ask("DELETE", self._object(path))

    def _object(self, path: str) -> str:
        return f"{self._access.container}/{urllib.parse.quote(path.partition('/')[2])}"

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, data: bytes | None = None
    ) -> tuple[dict[str, str], bytes]:
        """Return headers and body of an answer; tries again what may work later."""
        why = ""
        for turn in range(TRIES):
            if turn:
                self._clock.sleep(min(2.0**turn / 4, 8.0))
            try:
                url, own = self._access.request(path)
                form = {"Content-Type": "application/octet-stream"} if data is not None else {}
                request = urllib.request.Request(url, data, {**own, **form, **(headers or {})}, method=method)
                with send(request) as answer:
                    return {name.lower(): value for name, value in answer.headers.items()}, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    body, status = error.read().decode("utf-8", "replace"), error.code
                    body = body or str(error.headers.get("x-ms-error-code") or "")  # HEAD has no body
                if status == 404:
                    raise FileNotFoundError(errno.ENOENT, "the container or object does not exist") from None
                why = f"{status} {' '.join(body.split())[:200]}"
                if is_taken(status, body):
                    raise OSError(errno.ESTALE, why) from None  # the object is another version
                if status not in LATER and not (status == 401 and self._access.renew()):
                    raise PermissionError(errno.EACCES if status in (401, 403) else errno.EIO, why) from None
            except PermissionError:
                raise  # no credentials
            except (OSError, http.client.HTTPException) as error:
                why = str(error)
        raise OSError(errno.EIO, f"{method} {self._access.endpoint}: {why}")
