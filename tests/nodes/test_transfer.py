"""A bundle on its way to the machines of a job: each machine here is a folder, and the bytes between them go over loopback."""

from __future__ import annotations

import socket
import ssl
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cloudtrain.errors import BackendError
from cloudtrain.nodes import bundles, transfer
from cloudtrain.nodes.agents import Answer, LocalAgent, call_all
from cloudtrain.source.bundle import Bundle

SIZE = 5 << 18  # two pieces


class Place(LocalAgent):
    """An agent with a folder of its own that counts what it is given; `changes` replaces operations."""

    def __init__(self, root: Path, threads: ThreadPoolExecutor) -> None:
        self.root, self._threads, self.given, self.passed_on = root, threads, 0, 0
        self.changes: dict[str, Any] = {}
        self.label = self.internal = "127.0.0.1"
        self.agent = self.courier = self

    def begin(self, operation: str, given: bytes | None = None, **arguments: Any) -> Future[Answer]:
        return self._threads.submit(self.ask, operation, given, **arguments)

    def ask(self, operation: str, given: bytes | None = None, **arguments: Any) -> Answer:
        if "root" in arguments:
            arguments["root"] = self.root
        if operation in self.changes:
            return Answer(self.changes[operation](**arguments))
        self.given += len(given or b"")
        answer = super().ask(operation, given, **arguments)
        self.passed_on += answer.value if operation == "give" else 0
        return answer

    def extract(self, bundle: Bundle) -> None:
        self.ask("extract", root=self.root, sha256=bundle.sha256, into=self.root / "source")

    def source(self) -> bytes:
        return (self.root / "source" / "data").read_bytes()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(128) as pool:
        yield pool


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "data").write_bytes(Random(31).randbytes(SIZE))
    return Bundle.make(tmp_path / "project", tmp_path / "bundles")


@pytest.fixture
def places(tmp_path: Path, threads: ThreadPoolExecutor):
    return lambda number: [Place(tmp_path / f"host-{at}", threads) for at in range(number)]


def distribute(hosts: list[Place], bundle: Bundle, host_to_host: bool = True, holders: int = 0) -> None:
    distribution = transfer.Distribution("~", bundle, not holders, host_to_host)
    work = [(host, at < holders) for at, host in enumerate(hosts)]
    errors = call_all(lambda it: distribution.bring(it[0], it[1], lambda: it[0].extract(bundle)), work)
    assert errors == [None] * len(hosts)
    distribution.report()


@pytest.mark.parametrize(("number", "host_to_host", "uploads"), [(64, True, 1), (3, False, 3)])
def test_bytes_from_here(places, bundle, caplog, number, host_to_host, uploads):
    hosts = places(number)
    distribute(hosts, bundle, host_to_host)
    assert sum(host.given for host in hosts) == uploads * bundle.size_bytes
    assert sum(host.passed_on for host in hosts) == (number - uploads) * bundle.size_bytes
    assert {host.source() for host in hosts} == {(bundle.path.parent.parent / "project" / "data").read_bytes()}
    assert not caplog.messages and not bundles._LISTENING
    assert [path.name for path in (hosts[-1].root / "src").iterdir()] == [f"{bundle.sha256}.tar.gz"]


def test_a_machine_that_has_it_is_the_source(places, bundle):
    holder, other = hosts = places(2)
    transfer.send_bundle(holder, "~", bundle)
    distribute(hosts, bundle, holders=1)
    assert (other.given, holder.passed_on) == (0, bundle.size_bytes)


def test_a_small_bundle_goes_to_each(places, bundle, monkeypatch):
    monkeypatch.setattr(transfer, "SHARED_BYTES", bundle.size_bytes + 1)
    distribute(hosts := places(2), bundle)
    assert [host.given for host in hosts] == [bundle.size_bytes] * 2


def test_an_upload_continues_where_the_last_one_ended(places, bundle):
    (host,) = places(1)
    first = bundle.path.read_bytes()[: 1 << 20]
    facts: dict[str, Any] = {"root": "~", "sha256": bundle.sha256, "size": bundle.size_bytes}
    host.ask("put", first, offset=0, **facts)  # and the client is killed
    assert host.ask("arrived", **facts).value == len(first)
    transfer.send_bundle(host, "~", bundle)
    host.extract(bundle)
    assert host.given == bundle.size_bytes  # of which the first piece was sent once


def test_a_broken_transfer_continues_where_it_ended(places, bundle):
    source, other = places(2)
    transfer.send_bundle(source, "~", bundle)
    whole = source.root / "src" / f"{bundle.sha256}.tar.gz"
    text = whole.read_bytes()
    whole.write_bytes(text[: SIZE // 2])  # the source ends in the midst of it
    identity = transfer._make_identity()
    facts: dict[str, Any] = {"root": "~", "sha256": bundle.sha256, "identity": identity}

    def once() -> int:
        port = source.ask("listen", host="127.0.0.1").value
        sending = source.begin("give", port=port, **facts)
        try:
            other.ask("fetch", host="127.0.0.1", port=port, size=bundle.size_bytes, **facts)
        finally:
            sent = sending.result().value
        return sent

    with pytest.raises(BackendError, match="ended the transfer"):
        once()
    whole.write_bytes(text)
    assert once() == bundle.size_bytes - SIZE // 2
    other.extract(bundle)
    assert other.given == 0


def test_a_changed_bundle_is_refused_and_uploaded_instead(places, bundle, caplog):
    source, other = hosts = places(2)
    extract = source.extract

    def tamper(it: Bundle) -> None:
        extract(it)
        path = source.root / "src" / f"{it.sha256}.tar.gz"
        path.write_bytes(path.read_bytes()[:-9] + b"\1" * 9)

    source.extract = tamper
    distribute(hosts, bundle)
    assert (other.given, other.source()) == (bundle.size_bytes, source.source())
    assert ["not the bundle that was sent" in line for line in caplog.messages] == [True]


def test_a_port_that_is_closed(places, bundle, caplog):
    hosts = places(3)
    for host in hosts:
        host.changes["reach"] = lambda host, port: bundles.check_connection(host, 1)
    distribute(hosts, bundle)
    assert [host.given for host in hosts] == [bundle.size_bytes] * 3
    (line,) = caplog.messages
    assert line.startswith("the source went from here to 2 machines") and "Connection refused" in line
    assert not bundles._LISTENING


def test_an_address_that_the_machine_does_not_have(places, bundle, caplog):
    hosts = places(2)
    hosts[0].internal = "192.0.2.1"
    distribute(hosts, bundle)
    assert hosts[1].given == bundle.size_bytes and "Cannot assign requested address" in caplog.text


def test_a_stranger_gets_nothing_and_keeps_none_from_it(places, bundle):
    source, other = places(2)
    transfer.send_bundle(source, "~", bundle)
    ours, strange = transfer._make_identity(), transfer._make_identity()
    port = source.ask("listen", host="127.0.0.1").value
    facts: dict[str, Any] = {"root": "~", "sha256": bundle.sha256}
    sending = source.begin("give", port=port, identity=ours, **facts)
    fetch: dict[str, Any] = {"host": "127.0.0.1", "port": port, "size": bundle.size_bytes, **facts}
    with pytest.raises(BackendError, match="certificate verify failed"):
        other.ask("fetch", identity=strange, **fetch)
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port)) as plain, anonymous.wrap_socket(plain) as secure:
        with pytest.raises(OSError):
            secure.sendall(bytes(8))
            secure.recv(1)
            pytest.fail("bytes of the bundle")
    other.ask("fetch", identity=ours, **fetch)
    assert sending.result().value == bundle.size_bytes


def test_several_uploads_at_once(places, bundle, threads, monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1 << 18)
    monkeypatch.setattr(transfer, "WINDOW", 1)
    (host,) = places(1)
    for future in [threads.submit(transfer.send_bundle, host, "~", bundle) for _ in range(8)]:
        future.result()
    host.extract(bundle)
    assert [path.name for path in (host.root / "src").iterdir()] == [f"{bundle.sha256}.tar.gz"]


def test_an_upload_that_ends_first_is_not_replaced_by_a_later_one(places, bundle, monkeypatch):
    (host,) = places(1)
    text = bundle.path.read_bytes()
    facts: dict[str, Any] = {"root": "~", "sha256": bundle.sha256, "size": len(text)}
    host.ask("put", text[: 1 << 20], offset=0, **facts)
    whole, partial = bundles._paths(host.root, bundle.sha256, len(text))

    def meanwhile(*_: object) -> None:
        partial.write_bytes(text)
        partial.rename(whole)  # one upload ends
        partial.write_bytes(b"")  # and a third one begins

    monkeypatch.setattr(bundles.fcntl, "flock", meanwhile)
    host.ask("put", text[1 << 20 :], offset=1 << 20, **facts)
    assert (whole.read_bytes(), partial.read_bytes()) == (text, b"")
