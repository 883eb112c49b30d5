"""A bundle on its way to the machines of a job: each machine here is a folder."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cloudtrain.nodes import bundles, transfer
from cloudtrain.nodes.agents import Answer, LocalAgent, call_all
from cloudtrain.source.bundle import Bundle

SIZE = 5 << 18  # two pieces


class Place(LocalAgent):
    """An agent with a folder of its own that counts what it is given."""

    def __init__(self, root: Path, threads: ThreadPoolExecutor) -> None:
        self.root, self._threads, self.given = root, threads, 0

    def begin(self, operation: str, given: bytes | None = None, **arguments: Any) -> Future[Answer]:
        return self._threads.submit(self.ask, operation, given, **arguments)

    def ask(self, operation: str, given: bytes | None = None, **arguments: Any) -> Answer:
        if "root" in arguments:
            arguments["root"] = self.root
        self.given += len(given or b"")
        return super().ask(operation, given, **arguments)

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


def test_each_machine_gets_it_once(places, bundle):
    hosts = places(3)
    transfer.send_bundle(hosts[0], "~", bundle)
    work = [(host, host is hosts[0]) for host in hosts]
    bring = lambda it: transfer.bring_bundle(it[0], "~", bundle, it[1], lambda: it[0].extract(bundle))  # noqa: E731
    assert call_all(bring, work) == [None] * len(hosts)
    assert [host.given for host in hosts] == [bundle.size_bytes] * 3
    assert {host.source() for host in hosts} == {(bundle.path.parent.parent / "project" / "data").read_bytes()}


def test_a_changed_bundle_is_refused_and_uploaded_again(places, bundle):
    (host,) = places(1)
    transfer.send_bundle(host, "~", bundle)
    path = host.root / "src" / f"{bundle.sha256}.tar.gz"
    path.write_bytes(path.read_bytes()[:-9] + b"\1" * 9)
    transfer.bring_bundle(host, "~", bundle, True, lambda: host.extract(bundle))
    assert host.given == 2 * bundle.size_bytes
    assert host.source() == (bundle.path.parent.parent / "project" / "data").read_bytes()


def test_an_upload_continues_where_the_last_one_ended(places, bundle):
    (host,) = places(1)
    first = bundle.path.read_bytes()[: 1 << 20]
    facts: dict[str, Any] = {"root": "~", "sha256": bundle.sha256, "size": bundle.size_bytes}
    host.ask("put", first, offset=0, **facts)  # and the client is killed
    assert host.ask("arrived", **facts).value == len(first)
    transfer.send_bundle(host, "~", bundle)
    host.extract(bundle)
    assert host.given == bundle.size_bytes  # of which the first piece was sent once


def test_several_uploads_at_once(places, bundle, threads, monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1 << 18)
    monkeypatch.setattr(transfer, "WINDOW", 1)
    (host,) = places(1)
    for future in [threads.submit(transfer.send_bundle, host, "~", bundle) for _ in range(8)]:
        future.result()
    host.extract(bundle)
    left = {path.name for path in (host.root / "src").iterdir()} - {f".{bundle.sha256}.bytecode"}
    assert left == {f"{bundle.sha256}.tar.gz"}


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
