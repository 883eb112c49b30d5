"""What is kept in the store: presigned URLs that every store accepts, and facts that are written once."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

from cloudtrain.backends.akash.control import Control
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.store.s3 import S3 as S3Objects
from tests.stores import S3, running

KEY, SECRET = "AKIANODES0", "secret-of-nodes-0"


def signature(url: str, method: str, secret: str) -> str:
    """Compute the signature of a presigned URL by the documentation, without botocore.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html (2026-11-25)
    """
    parts = urlsplit(url)
    query = sorted((name, value) for name, value in parse_qsl(parts.query) if name != "X-Amz-Signature")
    values = dict(query)
    encoded = urlencode(query).replace("+", "%20")
    canonical = f"{method}\n{parts.path}\n{encoded}\nhost:{parts.netloc}\n\nhost\nUNSIGNED-PAYLOAD"
    _, scope = values["X-Amz-Credential"].split("/", 1)
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{values['X-Amz-Date']}\n{scope}\n{digest}"
    return hmac.digest(key, text.encode(), "sha256").hex()


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize(
    ("region", "endpoint", "host"),
    [("eu-west-1", None, "bucket.s3.eu-west-1.amazonaws.com"), ("auto", "https://store.example", "store.example")],
)
def test_urls_are_signed_with_version_4_over_the_host_alone(
    method: str, region: str, endpoint: str | None, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    url = S3Objects(Aws("akash", region, None, endpoint), "s3://bucket/ct/run a").url("end-0", method, 10**9)
    values = dict(parse_qsl(urlsplit(url).query))
    assert urlsplit(url).netloc == host and values["X-Amz-SignedHeaders"] == "host"
    assert values["X-Amz-Expires"] == str(7 * 86400), "more is refused"
    assert values["X-Amz-Signature"] == signature(url, method, SECRET)
    assert values["X-Amz-Signature"] != signature(url, "DELETE", SECRET)


def test_a_fact_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(S3) as store:
        for name, value in store.environ.items():
            monkeypatch.setenv(name, value)
        aws = Aws("akash", "us-east-1", None, store.url)
        first, second = (Control(aws, "s3://bucket/ct/", "run-a1") for _ in range(2))
        assert first.read("lease") is None and first.names() == []
        assert first.create("lease", {"dseq": "1"}) and not second.create("lease", {"dseq": "2"})
        assert second.read("lease") == {"dseq": "1"} and second.names() == ["lease"]
        assert Control(aws, "s3://bucket/ct", "run-a11").names() == []
