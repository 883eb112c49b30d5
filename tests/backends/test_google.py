"""Google's credentials as they are used without a simulator: real google-auth, a service account's key, a token server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from google.auth.compute_engine import _metadata

from cloudtrain.backends.google import ApiError, GoogleApi
from cloudtrain.cli import main
from cloudtrain.errors import BackendError
from tests.conftest import WAIT_S, served


class Tokens:
    """A token server and the key file of an account that asks it."""

    def __init__(self, key: Path) -> None:
        self.key, self.asked = key, []
        self.status, self.answer = 200, {"access_token": "t0ken", "expires_in": 3600, "token_type": "Bearer"}
        tokens = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                tokens.asked.append(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps(tokens.answer).encode()
                self.send_response(tokens.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.server.server_port}/token"
        about = {"type": "service_account", "project_id": "my-project", "private_key": _private_key(), "token_uri": url}
        key.write_text(json.dumps({**about, "client_email": "me@my-project.iam.gserviceaccount.com"}))


def _private_key() -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    plain = serialization.NoEncryption()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(*form, plain).decode()


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tokens]:
    made = Tokens(tmp_path / "key.json")
    for name in ("GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "CLOUDSDK_COMPUTE_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(made.key))
    monkeypatch.setenv("CLOUDSDK_AI_REGION", "europe-west4")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_token_is_fetched_once_and_with_google_auth_alone(tokens: Tokens) -> None:
    script = (
        "import sys; from cloudtrain.backends.google import GoogleApi\n"
        "api = GoogleApi('us-central1'); api.credentials()\n"
        "print(api.credentials().token, sorted(sys.modules.keys() & {'requests', 'urllib3', 'google.api_core', 'grpc'}))"
    )
    env = {**os.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "t0ken []\n", done.stderr
    assert len(tokens.asked) == 1 and b"jwt-bearer" in tokens.asked[0]


def test_an_account_that_is_refused(tokens: Tokens) -> None:
    tokens.status, tokens.answer = 400, {"error": "invalid_grant", "error_description": "account not found"}
    with pytest.raises(
        BackendError, match="service account or its key was deleted: invalid_grant: account not"
    ) as caught:
        GoogleApi("us-central1").credentials()
    assert caught.value.hint.startswith("gcloud iam service-accounts keys create")


def test_no_credentials_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setattr(_metadata, "_NO_GCE_CHECK", True)  # NO_GCE_CHECK, which google-auth reads once, at its import
    with pytest.raises(BackendError, match="no credentials for Google Cloud were found"):
        GoogleApi("us-central1").credentials()


def test_init_writes_what_the_account_tells(tokens: Tokens, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    assert main(["init", "-t", "vertex"]) == 0
    text = (tmp_path / "cloudtrain.toml").read_text()
    assert 'project = "my-project"' in text and 'region = "europe-west4"' in text
    assert "target: vertex" in (tmp_path / "job.yaml").read_text()
    capsys.readouterr()
    assert main(["doctor", "vertex"]) == 1
    output = capsys.readouterr().out
    assert "options.vertex.bucket" in output and "options.vertex.project" not in output


def test_a_refusal_that_breaks_off_is_still_that_refusal() -> None:
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"error": ')

        def log_message(self, *_: object) -> None:
            pass

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Broken)) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ApiError, match="it cannot be read: permission denied") as refused:
            GoogleApi("r", lambda: address).call("GET", "storage", "/b/x", "it cannot be read")
        assert refused.value.status == 403
