"""Object stores on loopback for tests: moto's server for s3, gcp-storage-emulator for gs, and the order of what they get."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

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


@contextmanager
def running(kind: type[S3] | type[GCS]) -> Iterator[S3 | GCS]:
    store = kind()
    try:
        yield store
    finally:
        store.close()
