"""Object stores on loopback for tests: moto for s3, gcp-storage-emulator for gs, ours for az; the order of what they get."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

from cloudtrain.backends.http import ask
from cloudtrain.source.node_code import module

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_DEFAULT_REGION": "us-east-1"}


class S3:
    """One bucket, `bucket`, of a server of its own."""

    scheme = "s3"

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        self.changes: list[tuple[str, str]] = []  # (PUT, POST or DELETE; key), in the order of arrival
        self.refuse = ""  # keys that begin with it cannot be written
        self.hold = threading.Event()  # uploads wait for it
        self.hold.set()
        app, condition = DomainDispatcherApplication(create_backend_app), threading.Lock()

        def seen(environ, start):
            key = unquote(environ["PATH_INFO"]).removeprefix("/bucket/")
            if environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE"):
                self.hold.wait(120)
                self.changes.append((environ["REQUEST_METHOD"], key))
                if self.refuse and key.startswith(self.refuse):
                    start("403 Forbidden", [("Content-Type", "application/xml")])
                    return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
            if environ.get("HTTP_IF_NONE_MATCH"):
                with condition:  # S3 looks and writes at once, moto one after the other
                    return app(environ, start)
            return app(environ, start)

        class Quiet(WSGIRequestHandler):
            def log(self, *_, **__) -> None: ...

        self._server = make_server("127.0.0.1", 0, seen, threaded=True, request_handler=Quiet)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environ = KEYS | {"AWS_ENDPOINT_URL_S3": self.url}
        import boto3

        self._client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test-secret",
        )
        self._client.create_bucket(Bucket="bucket")

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket="bucket", Key=key, Body=data)
        self.changes.clear()

    def objects(self) -> dict[str, bytes]:
        found = {}
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket="bucket"):
            for item in page.get("Contents", []):
                try:
                    found[item["Key"]] = self._client.get_object(Bucket="bucket", Key=item["Key"])["Body"].read()
                except self._client.exceptions.NoSuchKey:
                    pass  # deleted since it was listed
        return found

    def close(self) -> None:
        from moto.core.models import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        self.hold.set()
        self._server.shutdown()
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()


class GCS:
    """One bucket, `bucket`, of an emulator of its own."""

    scheme = "gs"

    def __init__(self, _: Path | None = None) -> None:
        import requests
        from gcp_storage_emulator.server import create_server

        self._server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
        self._server.start()
        self.url = f"http://127.0.0.1:{self._server._api._httpd.server_address[1]}"
        self.environ = {"STORAGE_EMULATOR_HOST": self.url}
        self._session = requests.Session()

    def put(self, key: str, data: bytes) -> None:
        answer = self._session.post(
            f"{self.url}/upload/storage/v1/b/bucket/o",
            params={"uploadType": "media", "name": key},
            data=data,
            headers={"Content-Type": "application/octet-stream"},
        )
        answer.raise_for_status()

    def objects(self) -> dict[str, bytes]:
        from urllib.parse import quote

        items = self._session.get(f"{self.url}/storage/v1/b/bucket/o").json().get("items", [])
        return {
            item["name"]: self._session.get(
                f"{self.url}/storage/v1/b/bucket/o/{quote(item['name'], safe='')}", params={"alt": "media"}
            ).content
            for item in items
        }

    def close(self) -> None:
        self._session.close()
        self._server.stop()


AZURITE = os.environ.get("CLOUDTRAIN_AZURITE", "")  # the address of an Azurite, to be asked instead of the simulator
AZURITE_ACCOUNT = "devstoreaccount1"  # it and its key stand in Azurite's README
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class AZ:
    """One container, `bucket`, of the simulated account, or of Azurite where CLOUDTRAIN_AZURITE names its address."""

    scheme = "az"

    def __init__(self, page: int = 5000) -> None:
        from cloudtrain.simulators.blob import BlobService
        from cloudtrain.simulators.http import Server

        self.server = None if AZURITE else Server((service := BlobService(page)).routes)
        if self.server is not None:
            connection = service.connection(self.server.url)
        else:
            connection = (
                f"AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};BlobEndpoint={AZURITE}/{AZURITE_ACCOUNT}"
            )
        self.environ = {"AZURE_STORAGE_CONNECTION_STRING": connection}
        self._send("PUT", "bucket?restype=container", accept=(409,))
        for name in self.objects():
            self._send("DELETE", f"bucket/{quote(name)}")

    def put(self, key: str, data: bytes) -> None:
        self._send("PUT", f"bucket/{quote(key)}", data)

    def objects(self) -> dict[str, bytes]:
        node = module("launcher.output.blob")
        found, marker = [], ""
        while True:
            page, _, marker = node.listing(self._send("GET", node.list_path("bucket", "", marker)))
            found += [one["name"] for one in page]
            if not marker:
                return {name: self._send("GET", f"bucket/{quote(name)}") for name in found}

    def _send(self, method: str, path: str, data: bytes | None = None, accept: tuple[int, ...] = ()) -> bytes:
        url, headers = module("launcher.output.blob").Access("bucket", self.environ).request(path)
        kind = {"x-ms-blob-type": "BlockBlob", "Content-Type": "application/octet-stream"}
        answer = ask(method, url, b"" if method == "PUT" and data is None else data, {**headers, **kind}, 60)
        assert answer.status < 300 or answer.status in accept, answer
        return answer.data

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


@contextmanager
def running(kind: type[S3] | type[GCS] | type[AZ]) -> Iterator[S3 | GCS | AZ]:
    store = kind()
    try:
        yield store
    finally:
        store.close()
