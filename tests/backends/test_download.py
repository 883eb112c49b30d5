"""Downloads from S3 (moto's server) and Cloud Storage (the simulator) behind a proxy that breaks them, onto full disks."""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

import cloudtrain
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.store import download, gcs
from cloudtrain.backends.store.blob import Blob
from cloudtrain.backends.store.files import Objects
from cloudtrain.backends.store.gcs import Gcs
from cloudtrain.backends.store.s3 import S3 as S3Objects
from cloudtrain.cli import main
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BackendError, DiskError
from cloudtrain.simulators.gcs import Storage
from cloudtrain.simulators.http import Server
from cloudtrain.testing.clock import VirtualClock
from tests import disks
from tests.conftest import WAIT_S
from tests.stores import AZ, KEYS, S3

DATA = random.Random(1).randbytes(8 << 20)
PART = 1 << 20


class Proxy:
    """Forwards requests to a server, and treats the bodies of GET as `change` says."""

    def __init__(self, target: str) -> None:
        self.change: Callable[[bytes], bytes | None] = lambda body: (
            body
        )  # a shorter body is a connection that broke off
        self.ranges: list[str] = []  # of the requests for bytes, in their order
        self.sent = 0  # bytes of bodies
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
                headers = {"Content-Type": "", **self.headers}  # urllib would name a form
                asked = urllib.request.Request(target + self.path, body, headers, method=self.command)
                try:
                    answer = urllib.request.urlopen(asked, timeout=WAIT_S)
                except urllib.error.HTTPError as error:
                    answer = error
                data = answer.read()
                sent = data
                if self.command == "GET" and "Range" in self.headers:
                    proxy.ranges.append(self.headers["Range"])
                    sent = proxy.change(data)
                    proxy.sent += len(sent)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                length = answer.headers["Content-Length"] if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else sent)
                self.close_connection = len(sent) < len(data)

            do_HEAD = do_PUT = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Place:
    """One bucket behind a proxy: how objects get there, and how a client fetches them."""

    def __init__(self, kind: str, folder: Path, patch: pytest.MonkeyPatch | None = None) -> None:
        self.kind = kind
        if kind == "s3":
            self._s3 = S3()
            self.put, self._close = self._s3.put, self._s3.close
            self.delete = lambda name: self._s3._client.delete_object(Bucket="bucket", Key=name) and None
            self.proxy = Proxy(self._s3.url)
            aws = Aws("sagemaker", "us-east-1", None, self.proxy.url, VirtualClock())
            self.objects: Objects = S3Objects(aws, "s3://bucket")
        elif kind == "az":
            az = AZ()
            assert az.server is not None and patch is not None, "the proxy stands before our own server"
            self.put, self._close = az.put, az.close
            self.delete = lambda name: az._send("DELETE", f"bucket/{quote(name)}", accept=(404,)) and None
            self.proxy = Proxy(az.server.url)
            connection = az.environ["AZURE_STORAGE_CONNECTION_STRING"].replace(az.server.url, self.proxy.url)
            patch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
            self.objects = Blob("az://bucket", clock=VirtualClock(SYSTEM.now()))
        else:
            storage = Storage(folder / "storage")
            storage.create_bucket("bucket")
            server = Server(storage.routes)
            self.put = lambda name, data: storage.put("bucket", name, data)
            self.delete = lambda name: self._delete(f"{server.url}/storage/v1/b/bucket/o/{quote(name, safe='')}")
            self._close = server.close
            self.proxy = Proxy(server.url)
            self.objects = Gcs(GoogleApi("r", lambda: self.proxy.url, VirtualClock()), "gs://bucket")

    def fetch(self, into: Path) -> int:
        return download.download_all(self.objects.objects("run"), into)

    def _delete(self, address: str) -> None:
        if len(self.proxy.ranges) == 1:
            urllib.request.urlopen(urllib.request.Request(address, method="DELETE")).close()

    def close(self) -> None:
        self.proxy.close()
        self._close()


@pytest.fixture(params=["s3", "gs", "az"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(download, "PART_BYTES", PART)
    made = Place(request.param, tmp_path, monkeypatch)
    yield made
    made.close()


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- streams that break off -------------------------------------------------------------------------------------------


def test_a_stream_that_is_cut_at_3_of_8_mb_continues(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "PART_BYTES", 32 << 20)  # one request for all
    place.put("run/m", DATA)
    place.proxy.change = lambda body: body[: 3 << 20]
    assert place.fetch(tmp_path / "out") == 1
    assert files(tmp_path / "out") == {"m": DATA}
    assert place.proxy.ranges == [f"bytes={start << 20}-{len(DATA) - 1}" for start in (0, 3, 6)]
    assert place.proxy.sent == len(DATA), "it began anew"


def test_many_files_and_large_ones_arrive_whole_and_once(place: Place, tmp_path: Path):
    objects = {f"deep/{number}": DATA[:number] for number in (0, 1, 1000)} | {
        "a": DATA[:PART],
        "b": DATA[: PART + 1],
        "ü #%": b"x",
    }
    for name, data in objects.items():
        place.put(f"run/{name}", data)
    place.put("run-other/x", b"of another run")
    place.put("run/folder/", b"")
    for _ in range(2):
        assert place.fetch(tmp_path / "out") == len(objects)
        assert files(tmp_path / "out") == objects
        assert len(place.proxy.ranges) == len(objects), "an empty one needs no request, b needs two; later none"
    (tmp_path / "out" / "a").write_bytes(b"\0" * PART)  # the same size
    place.fetch(tmp_path / "out")
    assert files(tmp_path / "out") == objects


def test_a_fetch_that_failed_is_continued_by_the_next(place: Place, tmp_path: Path):
    place.put("run/m", DATA)
    arrived: list[int] = []

    def stop_after_three(body: bytes) -> bytes:
        arrived.append(len(body))
        return body if len(arrived) <= 3 else b""

    place.proxy.change = stop_after_three
    with pytest.raises(BackendError, match="reached"):
        place.fetch(tmp_path / "out")
    assert not (tmp_path / "out" / "m").exists()
    place.proxy.change, place.proxy.sent = (lambda body: body), 0
    place.fetch(tmp_path / "out")
    assert files(tmp_path / "out") == {"m": DATA}
    assert place.proxy.sent == len(DATA) - 3 * PART


def test_an_object_that_changed_since_is_fetched_from_its_beginning(place: Place, tmp_path: Path):
    place.put("run/m", DATA)
    left = iter([True, True])
    place.proxy.change = lambda body: body if next(left, False) else b""
    with pytest.raises(BackendError):
        place.fetch(tmp_path / "out")
    place.put("run/m", DATA[::-1])
    place.proxy.change = lambda body: body
    place.fetch(tmp_path / "out")
    assert files(tmp_path / "out") == {"m": DATA[::-1]}


def test_an_object_that_changes_meanwhile_arrives_as_its_newest_version(place: Place, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(download, "AT_ONCE", 1)
    place.put("run/deep/m", DATA)
    newest = DATA[::-1][: 5 << 20]
    changed = threading.Event()

    def change(body: bytes) -> bytes:
        if len(place.proxy.ranges) == 4 and not changed.is_set():
            changed.set()
            place.put("run/deep/m", newest)
        return body

    place.proxy.change = change
    place.fetch(tmp_path / "out")
    assert files(tmp_path / "out") == {"deep/m": newest}


def test_a_name_is_added_once(place: Place, tmp_path: Path):
    assert place.objects.add("run/x", b"first") is True
    assert place.objects.add("run/x", b"second") is False
    place.fetch(tmp_path / "out")
    assert files(tmp_path / "out") == {"x": b"first"}


def test_an_object_that_is_deleted_meanwhile_is_named(place: Place, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(download, "AT_ONCE", 1)
    place.put("run/m", DATA)
    place.proxy.change = lambda body: place.delete("run/m") or body
    with pytest.raises(BackendError, match=r"://bucket/run/m was deleted while it was downloaded"):
        place.fetch(tmp_path / "out")
    assert not (tmp_path / "out" / "m").exists()


def test_two_processes_that_fetch_the_same_object_leave_one_whole_file(place: Place, tmp_path: Path):
    place.put("run/m", DATA)
    threads = [threading.Thread(target=place.fetch, args=(tmp_path / "out",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert files(tmp_path / "out") == {"m": DATA} and len(place.proxy.ranges) == 8, "the others wait, and find it"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a//x"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str):
    fine, bad = (
        download.StoredObject(one, f"s3://b/{one}", 0, "v", 0, lambda *_: iter(()), lambda _: None, lambda: None)
        for one in ("a", name)
    )
    with pytest.raises(
        BackendError, match=re.escape(f"s3://b/{name} has the name {name!r}, which no file here can have")
    ):
        download.download_all([fine, bad], tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "x").exists()
    assert download.download_all([fine], tmp_path / "out") == 1 and files(tmp_path / "out") == {"a": b""}


# -- checksums --------------------------------------------------------------------------------------------------------


def test_a_damaged_part_is_noticed_and_fetched_again(place: Place, tmp_path: Path):
    place.put("run/m", DATA)
    place.proxy.change = lambda body: b"?" + body[1:] if len(place.proxy.ranges) == 5 else body
    place.fetch(tmp_path / "out")
    assert files(tmp_path / "out") == {"m": DATA} and len(place.proxy.ranges) == 16


def test_an_object_that_always_arrives_damaged_is_refused(place: Place, tmp_path: Path):
    place.put("run/m", DATA)
    place.proxy.change = lambda body: b"?" + body[1:]
    with pytest.raises(BackendError, match="differs from the stored file after the download"):
        place.fetch(tmp_path / "out")
    assert not (tmp_path / "out" / "m").exists()


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    made = Place("s3", tmp_path)
    yield made
    made.close()


def upload_parts(place: Place, key: str, sizes: list[int], **more: str) -> None:
    """Upload DATA in parts of these sizes, as other tools may."""
    client = place._s3._client
    upload = client.create_multipart_upload(Bucket="bucket", Key=key, **more)["UploadId"]
    parts, at = [], 0
    for number, size in enumerate(sizes, 1):
        about = {"Bucket": "bucket", "Key": key, "UploadId": upload, "PartNumber": number}
        parts.append({"PartNumber": number, "ETag": client.upload_part(Body=DATA[at : at + size], **about)["ETag"]})
        at += size
    client.complete_multipart_upload(Bucket="bucket", Key=key, UploadId=upload, MultipartUpload={"Parts": parts})


@pytest.mark.parametrize("sizes", [[8 << 20], [5 << 20, 3 << 20], [6 << 20, 2 << 20]])
def test_objects_of_several_parts_are_verified_too(stored: Place, tmp_path: Path, sizes: list[int]):
    upload_parts(stored, "run/m", sizes)
    (one,) = stored.objects.objects("run")
    assert one.version.endswith(f'-{len(sizes)}"')
    (tmp_path / "m").write_bytes(DATA)
    assert one.verify(tmp_path / "m") is True
    (tmp_path / "m").write_bytes(b"?" + DATA[1:])
    assert one.verify(tmp_path / "m") is False


def test_a_crc_of_cloud_storage_is_verified_where_there_is_no_md5(tmp_path: Path):
    (tmp_path / "m").write_bytes(b"123456789")
    assert gcs._verify({"crc32c": "4waSgw=="}, tmp_path / "m") is True  # the check value of the algorithm, E3069283
    assert gcs._verify({"crc32c": "4waSgA=="}, tmp_path / "m") is False
    assert gcs._verify({}, tmp_path / "m") is None


def test_the_crc_that_boto3_adds_is_verified(stored: Place, tmp_path: Path):
    stored._s3._client.put_object(Bucket="bucket", Key="run/m", Body=DATA, ChecksumAlgorithm="CRC32")
    (one,) = stored.objects.objects("run")
    (tmp_path / "m").write_bytes(DATA[:-1] + b"?")
    assert one.verify(tmp_path / "m") is False
    assert download.digest(Path(tmp_path / "m"), "crc32") != download.digest(Path(__file__), "crc32")


# -- archives ---------------------------------------------------------------------------------------------------------


def test_an_archive_is_continued_and_leaves_nothing_behind(stored: Place, tmp_path: Path):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name in ("weights", "deep/config"):
            entry = tarfile.TarInfo(name)
            entry.size = len(DATA)
            archive.addfile(entry, io.BytesIO(DATA))
    stored.put("run/model.tar.gz", raw.getvalue())
    stored.proxy.change = lambda body: body[: 3 << 20]
    into = tmp_path / "out" / "model"
    into.parent.mkdir()
    stored.objects.bring_archive("run/model.tar.gz", into)
    assert files(tmp_path / "out") == {"model/weights": DATA, "model/deep/config": DATA}
    stored.objects.bring_archive("run/none.tar.gz", tmp_path / "out" / "none")
    assert not (tmp_path / "out" / "none").exists()


# -- full disks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 4 MB."""
    with disks.small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(place: Place, small_disk: Path):
    place.put("run/m", DATA)
    with pytest.raises(DiskError, match=r"disk/out cannot be written: it needs 8.4 MB, and 4.2 MB are free") as caught:
        place.fetch(small_disk / "out")
    assert caught.value.exit_code == 2 and "another disk" in caught.value.hint
    assert place.proxy.ranges == [] and files(small_disk) == {}


def test_a_disk_that_fills_up_meanwhile_is_named_and_the_fetch_continues(place: Place, small_disk: Path, monkeypatch):
    place.put("run/m", DATA)
    monkeypatch.setattr(download._Download, "check_space", lambda *_: None)  # another process takes the space
    with pytest.raises(DiskError, match=re.escape(f"{small_disk}/out/m cannot be written: No space left on device")):
        place.fetch(small_disk / "out")
    assert [name for name in files(small_disk / "out") if not name.startswith(".")] == []
    subprocess.run(["mount", "-o", "remount,size=32m", small_disk], check=True)
    place.fetch(small_disk / "out")
    assert files(small_disk / "out") == {"m": DATA}


def test_a_limit_of_file_sizes_is_reported_alike(place: Place, tmp_path: Path):
    """In a process of its own, for the limit is the process's."""
    place.put("run/m", DATA)
    fetch = (
        f"S3(Aws('sagemaker', 'us-east-1', None, {place.proxy.url!r}), 's3://bucket/run/').bring('', into)"
        if place.kind == "s3"
        else "Blob('az://bucket/run').bring('', into)"
        if place.kind == "az"
        else f"Gcs(GoogleApi('r', lambda: {place.proxy.url!r}), 'gs://bucket/run').bring('', into)"
    )
    script = f"""
import pathlib, resource, signal
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.store.blob import Blob
from cloudtrain.backends.store.gcs import Gcs
from cloudtrain.backends.store.s3 import S3
from cloudtrain.errors import DiskError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
into = pathlib.Path({str(tmp_path / "out")!r})
try:
    {fetch}
except DiskError as error:
    print(error.message, [path.name for path in into.iterdir() if not path.name.startswith(".")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **KEYS}, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.stdout == f"{tmp_path}/out/m cannot be written: File too large []\n", done.stderr


def test_the_command_says_what_is_full_and_exits_with_2(home: Path, tmp_path: Path, small_disk: Path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(
        "import os, pathlib\npathlib.Path(os.environ['CLOUDTRAIN_MODEL_DIR'], 'm').write_bytes(bytes(8 << 20))\n"
    )
    run = cloudtrain.Submitter("local", home=home).submit(
        {"name": "full", "source": str(source), "entrypoint": "train.py", "environment": {"requirements": "none"}}
    )
    assert str(run.wait(WAIT_S).state) == "SUCCEEDED"
    capsys.readouterr()
    assert main(["fetch", run.run_id, "-o", str(small_disk / "out")]) == 2
    shown = capsys.readouterr().err
    assert f"error: {small_disk}/out/model/m cannot be written: No space left on device" in shown
    assert "hint: free some space, or choose a folder on another disk" in shown
    assert not (small_disk / "out" / "model" / "m").exists()
