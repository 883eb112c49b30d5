"""Objects over 5 GB are uploaded and downloaded in parts."""

from __future__ import annotations  # noqa: I001

import io
from pathlib import Path

import pytest

from cloudtrain.backends.aws import Aws
from cloudtrain.backends.store import download, s3
from cloudtrain.backends.store.gcs import Gcs
from cloudtrain.errors import BackendError
from cloudtrain.source.folder_writer import folder_writer
from tests.backends.test_download import DATA, Place, stored  # noqa: F401 - a fixture


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of 6 GB that takes no space."""
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(6 << 30)
    return path


def test_a_file_over_5_gb_is_uploaded_in_parts(large: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    monkeypatch.setattr(s3.S3, "exists", lambda *_: False)
    monkeypatch.setattr(Aws, "call", lambda self, service, operation, **values: calls.append(operation))
    assert s3.S3(Aws("sagemaker", None, None, None), "s3://bucket").add("key", large) is True
    assert calls == ["upload_file"], "PutObject takes 5 GB"


def test_a_download_over_5_gb_is_asked_for_in_parts(large: Path, tmp_path: Path):
    lines = io.StringIO()
    one = download.StoredObject("m", "s3://b/m", large.stat().st_size, "v", 0, None, None, None)  # type: ignore[arg-type]
    with folder_writer(tmp_path / "into") as writer:
        made = download._Download(tmp_path / "into", writer, lambda: False)
        assert made._missing_parts(lines, "part", one) == list(range((6 << 30) // download.PART_BYTES))
        lines.write("0\n191\n")
        assert made._missing_parts(lines, "part", one) == list(range(1, 191))


def test_a_large_bundle_is_uploaded_in_parts_and_once(stored: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.setattr(s3, "ONE_REQUEST", 1000)
    (tmp_path / "bundle").write_bytes(DATA * 3)
    assert stored.objects.add("code/bundle", tmp_path / "bundle") is True
    assert stored.objects.add("code/bundle", tmp_path / "bundle") is False
    assert stored._s3.objects()["code/bundle"] == DATA * 3
    uploads = [method for method, key in stored._s3.changes if key == "code/bundle"]
    assert sorted(uploads) == ["POST", "POST", "PUT", "PUT", "PUT"], "one upload of three parts"


def test_an_upload_in_parts_that_is_refused_is_a_sentence(stored: Place, tmp_path: Path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(s3, "ONE_REQUEST", 1000)
    (tmp_path / "bundle").write_bytes(DATA * 2)
    stored._s3.refuse = "code/"
    with pytest.raises(BackendError, match="AWS denies s3:PutObject"):
        stored.objects.add("code/bundle", tmp_path / "bundle")


def test_a_bucket_whose_name_has_the_word_bucket_is_no_missing_one(tmp_path: Path):
    made = Place("gs", tmp_path)
    try:
        (tmp_path / "bundle").write_bytes(DATA)
        assert made.objects.add("src/x", tmp_path / "bundle") is True
        assert made.objects.add("src/x", tmp_path / "bundle") is False
        with pytest.raises(BackendError, match="the bucket none-such does not exist"):
            Gcs(made.objects._api, "gs://none-such").look_up("x")  # type: ignore[attr-defined]
    finally:
        made.close()
