"""Azure Blob Storage: both clients over one service, credentials, signatures, and the sentences of its errors."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cloudtrain.backends.http import ask
from cloudtrain.backends.store.blob import Blob
from cloudtrain.backends.store.files import NotRead
from cloudtrain.backends.store.open import opened
from cloudtrain.clock import Clock
from cloudtrain.errors import BackendError, BadRequest, MissingExtra, Unreachable
from cloudtrain.simulators.http import Fault, Request, Response, Server
from cloudtrain.source.node_code import module
from cloudtrain.testing.clock import VirtualClock
from tests.stores import AZ, AZURITE, running

node = module("launcher.output.blob")
ACCT = "https://acct.blob.core.windows.net"
KEY = base64.b64encode(b"k" * 32).decode()
own_server = pytest.mark.skipif(bool(AZURITE), reason="faults are our own server's")


@pytest.fixture
def az(monkeypatch: pytest.MonkeyPatch) -> Iterator[AZ]:
    with running(AZ) as started:
        for name, value in started.environ.items():
            monkeypatch.setenv(name, value)
        yield started


class Hasty(Clock):
    """The time of day, without waiting: a service looks at the end of a signature."""

    def sleep(self, seconds: float) -> None: ...


def here(uri: str = "az://bucket/run") -> Blob:
    return Blob(uri, clock=Hasty())


def there() -> Any:
    return node.Files("bucket", Hasty())


# -- credentials ------------------------------------------------------------------------------------------------------


def test_a_signature_is_that_of_the_sdk():
    """azure-storage-blob 12.31: SharedAccessSignature("account", KEY, x_ms_version=...).generate_account(...)."""
    made = node.signature("account", KEY, 1767323045)
    sdk = "se=2026-01-02T03%3A04%3A05Z&sp=rwdlac&sv=2021-12-02&ss=b&srt=sco&sig=2l0GKzMqxFjaAK725fDzOuodv/Fys5EsofbI8hCOQ24%3D"
    assert parse_qs(made) == parse_qs(sdk)


@pytest.mark.parametrize(
    "place,environ,endpoint,has",
    [
        ("c@acct", {}, ACCT, "token"),
        ("c@acct.dfs.core.windows.net", {}, ACCT, "token"),
        ("c", {"AZURE_STORAGE_ACCOUNT": "acct", "AZURE_STORAGE_KEY": KEY}, ACCT, "key"),
        ("c", {"AZURE_STORAGE_ACCOUNT_NAME": "acct", "AZURE_STORAGE_ACCOUNT_KEY": KEY}, ACCT, "key"),
        ("c@acct", {"AZURE_STORAGE_KEY": KEY}, ACCT, "key"),
        ("c@other", {"AZURE_STORAGE_ACCOUNT": "acct", "AZURE_STORAGE_KEY": KEY}, "https://other.blob.core.windows.net", "token"),
        ("c@acct", {"AZURE_STORAGE_SAS_TOKEN": "?sv=1&sig=x"}, ACCT, "sas"),
        ("c", {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName=acct;AccountKey={KEY};EndpointSuffix=core.chinacloudapi.cn"},
         "https://acct.blob.core.chinacloudapi.cn", "key"),
        ("c", {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=acct;SharedAccessSignature=sv=1&sig=x;BlobEndpoint=http://h/acct/"},
         "http://h/acct", "sas"),
        ("c@other", {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName=acct;AccountKey={KEY}"}, "https://other.blob.core.windows.net",
         "token"),
    ],
)  # fmt: skip
def test_an_account_and_its_credentials(place: str, environ: Mapping[str, str], endpoint: str, has: str):
    access = node.Access(place, environ, VirtualClock(), lambda: ("secret-token", 3600.0))
    url, headers = access.request("c/x?comp=block")
    assert url.startswith(f"{endpoint}/c/x?comp=block") and headers["x-ms-version"] == node.VERSION
    assert ("Authorization" in headers) == (has == "token")
    signed = parse_qs(urlsplit(url).query)
    assert ("sig" in signed) == (has != "token") and ("se" in signed) == (has == "key")


def test_an_address_without_an_account_is_refused():
    with pytest.raises(BadRequest, match="az://c names no storage account: write az://c@ACCOUNT"):
        Blob("az://c/x")
    with pytest.raises(BadRequest, match="az://"):
        opened("az://c@acct")


def test_a_token_is_asked_for_again_before_it_ends_and_when_it_is_refused():
    clock, count = VirtualClock(), iter(range(9))
    access = node.Access("c@acct", {}, clock, lambda: (f"t{next(count)}", 600.0))

    def bearer() -> str:
        return access.request("c")[1]["Authorization"]

    assert [bearer(), bearer()] == ["Bearer t0"] * 2
    clock.sleep(400)
    assert bearer() == "Bearer t0"
    clock.sleep(100)
    assert bearer() == "Bearer t1", "two minutes before its end"
    assert access.renew() and bearer() == "Bearer t2" and access.renew() and not access.renew()


def grants(answer: dict[str, Any], asked: list[Request], status: int = 200) -> Server:
    def give(request: Request) -> Response:
        asked.append(request)
        return Response(answer, status)

    return Server([(method, "/.*", give) for method in ("GET", "POST")])


def test_a_node_of_azure_ml_asks_its_own_endpoint():
    asked: list[Request] = []
    server = grants({"access_token": "abc", "expires_on": "99999999999"}, asked)
    environ = {"MSI_ENDPOINT": f"{server.url}/msi", "MSI_SECRET": "s", "DEFAULT_IDENTITY_CLIENT_ID": "me"}
    token, seconds = node.node_token(environ)
    server.close()
    assert token == "abc" and seconds > 3600 and asked[0].headers["secret"] == "s"
    assert asked[0].query == {"resource": "https://storage.azure.com/", "api-version": "2017-09-01", "clientid": "me"}


@pytest.mark.parametrize("kind", ["secret", "file"])
def test_a_service_principal_and_a_workload_identity(kind: str, tmp_path: Path):
    asked: list[Request] = []
    server = grants({"access_token": "abc", "expires_in": 3599}, asked)
    (tmp_path / "assertion").write_text("signed\n")
    own = (
        {"AZURE_CLIENT_SECRET": "hush"}
        if kind == "secret"
        else {"AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "assertion")}
    )
    environ = {"AZURE_TENANT_ID": "ten", "AZURE_CLIENT_ID": "me", "AZURE_AUTHORITY_HOST": server.url, **own}
    assert node.node_token(environ) == ("abc", 3599.0)
    server.close()
    form = {name: values[0] for name, values in parse_qs(asked[0].body.decode()).items()}
    assert asked[0].path == "/ten/oauth2/v2.0/token" and form["scope"] == "https://storage.azure.com/.default"
    assert form.get("client_secret") == ("hush" if kind == "secret" else None)
    assert form.get("client_assertion") == (None if kind == "secret" else "signed")


def test_a_refused_token_is_a_sentence():
    server = grants({"error": "invalid_client"}, [], 401)
    environ = {
        "AZURE_TENANT_ID": "t",
        "AZURE_CLIENT_ID": "m",
        "AZURE_CLIENT_SECRET": "x",
        "AZURE_AUTHORITY_HOST": server.url,
    }
    with pytest.raises(PermissionError, match="no token for Blob Storage: 401"):
        node.node_token(environ)
    server.close()


def test_without_azure_identity_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "azure.identity", None)
    with pytest.raises(MissingExtra, match="azure"):
        Blob("az://c@acct/x").read("y", 10)


# -- what both clients do ---------------------------------------------------------------------------------------------


def test_what_one_client_writes_the_other_reads(az: AZ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node, "PIECE", 1000)
    odd = "deep/ü ö #1?x=[y]*%2F&<.txt"
    files, data = there(), bytes(range(256)) * 20
    (tmp_path / "large").write_bytes(data)
    assert here().add("large", tmp_path / "large") is True and here().add("large", tmp_path / "large") is False
    assert here().add(odd, b"small") is True and here().add(odd, b"other") is False
    files.put_file(str(tmp_path / "large"), "bucket/run/of the node")
    assert files.cat_file(f"bucket/run/{odd}") == b"small"
    files.get_file("bucket/run/large", str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == data and az.objects()["run/of the node"] == data
    assert {name: one["size"] for name, one in files.find("bucket/run/").items()} == {
        "bucket/run/large": len(data), f"bucket/run/{odd}": 5, "bucket/run/of the node": len(data)
    }  # fmt: skip
    here().bring("", tmp_path / "out")
    assert (tmp_path / "out" / odd).read_bytes() == b"small" and (tmp_path / "out" / "of the node").read_bytes() == data
    found = here().look_up("large")
    assert (
        found is not None and found.verify(tmp_path / "large") is True and found.verify(tmp_path / "out" / odd) is False
    )
    assert here().look_up("none") is None and here().read("none", 9) is None
    assert here("az://bucket/run/large").look_up("") is not None
    files.rm_file("bucket/run/large")
    here().delete("large")
    assert files.info(f"bucket/run/{odd}")["size"] == 5
    with pytest.raises(FileNotFoundError):
        files.info("bucket/run/large")


def test_what_is_read_whole_has_a_bound(az: AZ):
    here().add("long", b"0123456789")
    assert here().read("long", 10) == b"0123456789"
    with pytest.raises(NotRead, match="has more than 9 bytes"):
        here().read("long", 9)


def test_folders_and_long_listings(monkeypatch: pytest.MonkeyPatch):
    az = AZ(page=3)
    for name, value in az.environ.items():
        monkeypatch.setenv(name, value)
    names = [f"{top}/{number}" for top in "abc" for number in range(4)]
    for name in names:
        az.put(f"run/{name}", b"x")
    az.put("run2/x", b"x")
    assert sorted(here().folders()) == ["a", "b", "c"] and sorted(one.name for one in here().objects()) == names
    assert len(there().find("bucket/run/")) == 12 and here().digest("a") != here().digest("b")
    az.close()


def test_of_several_that_create_a_name_one_succeeds(az: AZ):
    files, won, gate = there(), [], threading.Barrier(6)

    def create(number: int) -> None:
        gate.wait(60)
        try:
            files.pipe_file("bucket/claim", str(number).encode(), mode="create")
            won.append(number)
        except OSError:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [files.cat_file("bucket/claim")]


def test_a_signed_address_reads_and_no_more(az: AZ):
    az.put("run/x", b"data")
    assert ask("GET", here().url("x", "GET", 600), None, {}, 60).data == b"data"
    refused = ask(
        "PUT", here().url("x", "GET", 600), b"no", {"x-ms-blob-type": "BlockBlob", "Content-Type": "text/plain"}, 60
    )
    assert refused.status == 403 and az.objects()["run/x"] == b"data"


# -- faults -----------------------------------------------------------------------------------------------------------


@own_server
@pytest.mark.parametrize("status", [503, 429, 0])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_what_fails_once_is_asked_again(
    az: AZ, status: int, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(node, "PIECE", 1000)
    (tmp_path / "large").write_bytes(b"y" * 2500)
    for method in ("PUT", "GET", "HEAD"):
        az.server.faults.append(Fault(method, "bucket", status, after=after, headers={"Retry-After": "1"}))
    files = there()
    files.put_file(str(tmp_path / "large"), "bucket/run/m")
    files.get_file("bucket/run/m", str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == b"y" * 2500 and all(fault.times == 0 for fault in az.server.faults)
    for method in ("PUT", "GET"):
        az.server.faults.append(Fault(method, "bucket", status, after=after))
    here().add("n", tmp_path / "large")
    assert here().read("n", 10_000) == b"y" * 2500 and all(fault.times == 0 for fault in az.server.faults)


def test_errors_are_sentences_with_what_to_do(az: AZ, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BackendError) as none:
        here("az://absent/run").read("x", 9)
    assert "az://absent/run/x cannot be read: ContainerNotFound (404)" in none.value.message
    assert "az storage container create" in none.value.hint
    other = az.environ["AZURE_STORAGE_CONNECTION_STRING"].split("AccountKey=")
    wrong = f"{other[0]}AccountKey={KEY};{other[1].partition(';')[2]}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", wrong)
    with pytest.raises(BackendError) as denied:
        here().add("x", b"")
    assert "(403)" in denied.value.message and "Storage Blob Data Contributor" in denied.value.hint
    with pytest.raises(PermissionError, match="403"):
        there().pipe_file("bucket/x", b"")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", wrong.replace(KEY, "k"))
    with pytest.raises(BackendError, match="AZURE_STORAGE_KEY is not the key"):
        here().read("x", 9)


@own_server
def test_a_service_that_stays_away_is_unreachable(az: AZ):
    az.server.faults.append(Fault("GET", "bucket", 503, times=99))
    with pytest.raises(Unreachable, match=r"az://bucket/run/ cannot be listed: .*503"):
        list(here().objects())
