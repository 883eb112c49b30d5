"""Credentials that cannot be used, one case each: moto, a token server on loopback, files, and what cloudtrain says.

python -m tests.backends.credentials    writes docs/credentials.json, which docs/tables-evidence.md shows
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.aws import Aws
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.sagemaker import submission
from cloudtrain.errors import CloudtrainError
from cloudtrain.testing.clock import VirtualClock
from tests.backends.test_google import Tokens
from tests.backends.test_http import send, serving
from tests.conftest import served

FIGURES = Path(__file__).parents[2] / "docs" / "credentials.json"
ROLE = "arn:aws:iam::123456789012:role/training"
CONFIG = f"""
[profile team]
region = us-east-1
[profile sso]
sso_start_url = https://team.awsapps.com/start
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = team
[profile helper]
credential_process = "{sys.executable}" -c "import sys; sys.exit('vault: sealed')"
[profile mfa]
role_arn = {ROLE}
mfa_serial = arn:aws:iam::123456789012:mfa/me
source_profile = keys
[profile role]
role_arn = {ROLE}
source_profile = keys
[profile keys]
aws_access_key_id = AKIA
aws_secret_access_key = secret
"""
REQUEST = {
    **{
        "TrainingJobName": "a-run",
        "RoleArn": ROLE,
        "HyperParameters": {},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    },
    **{"AlgorithmSpecification": {"TrainingInputMode": "File"}, "OutputDataConfig": {"S3OutputPath": "s3://bucket/o"}},
    "ResourceConfig": {"VolumeSizeInGB": 1},
}
TRUST = (
    f"Could not assume role {ROLE}. Please ensure that the role exists and allows principal 'sagemaker.amazonaws.com'"
)
Case = Callable[["World"], object]
CASES: dict[str, Case] = {}


@dataclass
class World:
    """A home folder without credentials, and what a case changes of it."""

    folder: Path
    patch: pytest.MonkeyPatch

    def aws(self, profile: str | None = None, region: str = "us-east-1", url: str | None = None) -> Aws:
        return Aws("sagemaker", region, profile, url, VirtualClock())

    def ask(self, profile: str | None = None, **more: Any) -> object:
        return self.aws(profile, **more).call("sagemaker", "describe_training_job", TrainingJobName="a-run")

    def keys(self) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            self.patch.setenv(name, "test")

    def refused(self, code: str, message: str, profile: str | None = None) -> object:
        body = json.dumps({"__type": code, "message": message}).encode()
        with serving(lambda handler: send(handler, 400, body)) as (url, _):
            return self.ask(profile, url=url)

    def google(self, **about: Any) -> GoogleApi:
        """Return a client whose credentials' file has some fields."""
        file = self.folder / "google.json"
        file.write_text(json.dumps(about))
        self.patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        return GoogleApi("us-central1", clock=VirtualClock())

    def key_refused(self, text: str) -> object:
        """Ask for the token of a service account whose key the token server refuses."""
        with self.tokens() as tokens:
            tokens.status, tokens.answer = 400, {"error": "invalid_grant", "error_description": text}
            return GoogleApi("us-central1").credentials()

    @contextmanager
    def tokens(self) -> Iterator[Tokens]:
        """A token server, and the key of a service account that asks it as Google's credentials."""
        tokens = Tokens(self.folder / "key.json")
        self.patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tokens.key))
        try:
            yield tokens
        finally:
            tokens.server.shutdown()
            tokens.server.server_close()


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


@contextmanager
def world(folder: Path) -> Iterator[World]:
    from botocore.credentials import SSOProvider
    from botocore.retries import standard

    (folder / ".aws").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in [
            name
            for name in os.environ
            if name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_", "SSL_CERT", "REQUESTS_CA")) or "PROXY" in name.upper()
        ]:
            patch.delenv(name)
        (folder / ".aws" / "config").write_text(CONFIG)
        patch.setenv("HOME", str(folder))
        patch.setenv("CLOUDSDK_CONFIG", str(folder))
        for name in ("AWS_EC2_METADATA_DISABLED", "NO_GCE_CHECK"):
            patch.setenv(name, "true")
        patch.setattr(SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(folder / "sso"))
        patch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0.0)
        yield World(folder, patch)


def row(name: str, folder: Path) -> dict[str, str]:
    """Return what cloudtrain says in a case, without ports and folders."""
    with world(folder) as here:
        try:
            CASES[name](here)
        except CloudtrainError as error:
            texts = {"case": name, "message": error.message, "hint": error.hint}
        else:
            raise AssertionError(f"{name}: nothing was raised")
    shown = {key: text.replace(str(folder), "~") for key, text in texts.items()}
    shown = {key: re.sub(r"127\.0\.0\.1:\d+", "HOST", text) for key, text in shown.items()}
    return {key: re.sub(r": self.signed certificate \(_ssl\.c:\d+\)", "", text) for key, text in shown.items()}


# -- AWS --------------------------------------------------------------------------------------------------------------


@case("AWS: no credentials")
def _(here: World) -> object:
    return here.aws().check_credentials()


@case("AWS: a profile that does not exist")
def _(here: World) -> object:
    return here.ask("tean")


@case("AWS: expired keys in the environment")
def _(here: World) -> object:
    here.keys()
    return here.refused("ExpiredTokenException", "The security token included in the request is expired")


@case("AWS: expired keys in a file")
def _(here: World) -> object:
    return here.refused("ExpiredTokenException", "The security token included in the request is expired", "keys")


@case("AWS: SSO, never logged in")
def _(here: World) -> object:
    return here.aws("sso").check_credentials()


@case("AWS: SSO, the login has expired")
def _(here: World) -> object:
    from botocore.utils import SSOTokenLoader

    kept: dict[str, Any] = {}
    SSOTokenLoader(kept).save_token(
        "https://team.awsapps.com/start", {"accessToken": "t", "expiresAt": "2020-01-01T00:00:00Z"}
    )
    (here.folder / "sso").mkdir()
    for key, token in kept.items():
        (here.folder / "sso" / f"{key}.json").write_text(json.dumps(token))
    return here.aws("sso").check_credentials()


@case("AWS: credential_process fails")
def _(here: World) -> object:
    return here.aws("helper").check_credentials()


@case("AWS: credential_process does not exist")
def _(here: World) -> object:
    (here.folder / ".aws" / "config").write_text("[profile helper]\ncredential_process = no-such-program")
    return here.aws("helper").check_credentials()


@case("AWS: a profile asks for an MFA code, without a terminal")
def _(here: World) -> object:
    return here.aws("mfa").check_credentials()


@case("AWS: the profile's role may not be assumed")
def _(here: World) -> object:
    text = f"User: arn:aws:iam::123456789012:user/me is not authorized to perform: sts:AssumeRole on resource: {ROLE}"
    body = f"<ErrorResponse><Error><Code>AccessDenied</Code><Message>{text}</Message></Error></ErrorResponse>"
    with serving(lambda handler: send(handler, 403, body.encode())) as (url, _):
        here.patch.setenv("AWS_ENDPOINT_URL_STS", url)
        return here.aws("role").check_credentials()


@case("AWS: SageMaker cannot assume the job's role")
def _(here: World) -> object:
    return create(here, age_s=3600.0)[0]


@case("AWS: a region that does not exist")
def _(here: World) -> object:
    here.keys()
    here.patch.setattr(socket, "getaddrinfo", no_address)
    return here.ask(region="us-est-1")


@case("AWS: a proxy that does not answer")
def _(here: World) -> object:
    here.keys()
    here.patch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    return here.ask()


@case("AWS: a certificate that is not known here")
def _(here: World) -> object:
    here.keys()
    with secured(here.folder) as url:
        return here.ask(url=url)


@case("AWS: a clock that is wrong")
def _(here: World) -> object:
    here.keys()
    text = "Signature expired: 20261128T100000Z is now earlier than 20261128T115500Z (20261128T120000Z - 5 min.)"
    return here.refused("InvalidSignatureException", text)


@case("AWS: keys that were deleted")
def _(here: World) -> object:
    here.keys()
    return here.refused("UnrecognizedClientException", "The security token included in the request is invalid")


# -- Google -----------------------------------------------------------------------------------------------------------


@case("Google: no credentials")
def _(here: World) -> object:
    return GoogleApi("us-central1").credentials()


@case("Google: the file of the credentials does not exist")
def _(here: World) -> object:
    here.patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(here.folder / "missing.json"))
    return GoogleApi("us-central1").credentials()


@case("Google: the login has expired")
def _(here: World) -> object:
    body = json.dumps({"error": "invalid_grant", "error_description": "Token has been expired or revoked."}).encode()
    with serving(lambda handler: send(handler, 400, body)) as (url, _):
        about = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"}
        here.patch.setattr("google.oauth2.credentials._GOOGLE_OAUTH2_TOKEN_ENDPOINT", url)
        return here.google(**about).credentials()


@case("Google: the key was deleted")
def _(here: World) -> object:
    return here.key_refused("Invalid JWT Signature.")


@case("Google: a clock that is wrong")
def _(here: World) -> object:
    return here.key_refused(
        "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe."
    )


@case("Google: a program that gives the credentials may not run")
def _(here: World) -> object:
    about = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/x",
        "token_url": "https://sts.googleapis.com",
    }
    source = {"executable": {"command": "helper", "timeout_millis": 5000}}
    kind = "urn:ietf:params:oauth:token-type:id_token"
    return here.google(**about, credential_source=source, subject_token_type=kind).credentials()


@case("Google: a region that does not exist")
def _(here: World) -> object:
    with here.tokens():
        api = GoogleApi("us-centrl1", clock=VirtualClock())
        api.credentials()
    here.patch.setattr(socket, "getaddrinfo", no_address)
    return api.call("GET", "aiplatform", "/v1/jobs", "jobs cannot be listed")


@case("Google: a proxy that does not answer")
def _(here: World) -> object:
    here.patch.setenv("http_proxy", "http://127.0.0.1:9")
    here.patch.setattr("urllib.request._opener", None)  # it keeps the proxies of its first use
    with here.tokens():
        return GoogleApi("us-central1").credentials()


@case("Google: a certificate that is not known here")
def _(here: World) -> object:
    with secured(here.folder) as url, here.tokens() as tokens:
        return here.google(**json.loads(tokens.key.read_text()) | {"token_uri": url}).credentials()


# -- what the cases need ----------------------------------------------------------------------------------------------


def create(here: World, age_s: float, refusals: int = 99) -> tuple[object, list[float]]:
    """Create a job whose role has some age, and which SageMaker cannot assume at first; return its ARN and the pauses."""
    aws, left = here.aws(), [refusals]
    here.keys()
    created, pauses = datetime.fromtimestamp(aws.clock.now() - age_s, UTC), []

    def call(service: str, operation: str, **_: Any) -> Any:
        if service == "iam":
            return {"Role": {"CreateDate": created}}
        left[0] -= 1
        if left[0] < 0:
            return {"TrainingJobArn": "arn"}
        answer = {
            "Error": {"Code": "ValidationException", "Message": TRUST},
            "ResponseMetadata": {"HTTPStatusCode": 400},
        }
        from botocore.exceptions import ClientError

        raise aws.explain(ClientError(answer, "CreateTrainingJob"), "sagemaker:CreateTrainingJob")  # type: ignore[arg-type]

    sleep = aws.clock.sleep
    here.patch.setattr(aws, "call", call)
    here.patch.setattr(aws.clock, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds))[0])
    arn = submission.submit_job(aws, None, "a-run", REQUEST, {"client": "boto3"})  # type: ignore[arg-type]
    return arn, pauses


def no_address(*_: object, **__: object) -> Any:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def unknown_certificate(folder: Path) -> ssl.SSLContext:
    """Return a server's side of TLS with a certificate that nothing vouches for."""
    from datetime import timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    moment = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = (
        builder.serial_number(1)
        .not_valid_before(moment - timedelta(days=1))
        .not_valid_after(moment + timedelta(days=1))
    )
    pem = folder / "server.pem"
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem.write_bytes(
        key.private_bytes(*form) + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context


@contextmanager
def secured(folder: Path) -> Iterator[str]:
    """Yield the URL of a server with a certificate that nothing vouches for."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    context = unknown_certificate(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    with served(server):
        yield f"https://127.0.0.1:{server.server_port}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(name, Path(folder) / str(number)) for number, name in enumerate(CASES)]
    FIGURES.write_text(json.dumps(rows, indent=1) + "\n")
