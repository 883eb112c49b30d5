"""A program in a pod over a websocket: our server against lightkube's client, our client against what goes wrong."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cloudtrain.backends import shell
from cloudtrain.backends.kubernetes import channel
from cloudtrain.backends.kubernetes.client import KubeApi
from cloudtrain.errors import BackendError, Unreachable
from tests.conftest import WAIT_S, wait_for
from tests.simulators.kubernetes_cluster.server import Cluster
from tests.simulators.kubernetes_cluster.websocket import Frames

POD = "sleeper"
EVERY_BYTE = bytes(range(256)) * 2000
NESTED = "import sys, os; data = sys.stdin.buffer.read(); os.write(1, data); os.write(2, b'errors'); sys.exit(3)"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("exec")) as made:
        yield made


@pytest.fixture
def pod(cluster: Cluster) -> Iterator[str]:
    """A pod that sleeps, made by lightkube; it is deleted by name afterwards."""
    from lightkube.models.core_v1 import Container, PodSpec
    from lightkube.models.meta_v1 import ObjectMeta
    from lightkube.resources.core_v1 import Pod

    client = oracle(cluster)
    container = Container(name="node", image="any:1", command=["sh", "-c", "echo up; exec sleep 600"])
    spec = PodSpec(containers=[container], restartPolicy="Never", hostname=POD)
    client.create(Pod(metadata=ObjectMeta(name=POD), spec=spec))
    wait_for(lambda: client.get(Pod, POD).status.phase == "Running", "the pod")
    yield POD
    client.delete(Pod, POD, grace_period=0)
    wait_for(lambda: not list(client.list(Pod)), "the end of the pod")


def oracle(cluster: Cluster):
    from lightkube import Client, KubeConfig

    return Client(config=KubeConfig.from_file(str(cluster.kubeconfig)), trust_env=False)


def run(cluster: Cluster, *argv: str, given: bytes | None = None, container: str = "node") -> shell.Completed:
    api = KubeApi(str(cluster.kubeconfig), None)
    path = channel.exec_path("default", POD, container, argv, stdin=given is not None, terminal=False)
    stream = shell.Shell(stream=lambda *streams: channel.run(api, path, *streams))
    return shell.call(stream, given)


def test_the_server_answers_a_client_that_is_not_ours(cluster: Cluster, pod: str):
    out, err = io.BytesIO(), io.BytesIO()
    command = [sys.executable, "-c", NESTED]
    answer = oracle(cluster).exec(pod, command=command, stdin=EVERY_BYTE, stdout=out, stderr=err)
    assert (answer.exit_code, out.getvalue(), err.getvalue()) == (3, EVERY_BYTE, b"errors")
    assert oracle(cluster).exec(pod, command=["true"], stdout=True).exit_code == 0


def test_our_client_says_the_same(cluster: Cluster, pod: str):
    done = run(cluster, sys.executable, "-c", NESTED, given=EVERY_BYTE)
    assert done == shell.Completed(3, EVERY_BYTE, b"errors")
    assert run(cluster, "sh", "-c", "kill -9 $$").code == 137
    assert run(cluster, "printf", "%s|", "", "a b", "ü", "&=?#%", given=b"").out == "|a b|ü|&=?#%|".encode()


def test_what_the_server_refuses(cluster: Cluster, pod: str):
    with pytest.raises(BackendError, match="executable file not found"):
        run(cluster, "no-such-program")
    with pytest.raises(BackendError, match="container other is not valid"):
        run(cluster, "true", container="other")
    for verb in ("get", "create"):
        cluster.resources.denied.add((verb, "pods/exec"))
        with pytest.raises(BackendError, match=f"permission denied: .*cannot {verb} resource .pods/exec"):
            run(cluster, "true")
        cluster.resources.denied.clear()
    cluster.token, token = "another", cluster.token
    with pytest.raises(BackendError, match="does not accept the credentials"):
        run(cluster, "true")
    cluster.token = token


def test_a_pod_that_ends_ends_its_programs(cluster: Cluster, pod: str):
    results: list[object] = []

    def sleep() -> None:
        try:
            results.append(run(cluster, "sh", "-c", "touch begun; exec sleep 600"))
        except BackendError as error:
            results.append(error)

    thread = threading.Thread(target=sleep)
    thread.start()
    uid = cluster.objects.get("pods", "default", pod)["metadata"]["uid"]
    replica = cluster.kubelet.container(uid)
    wait_for((replica.folder / "begun").exists, "the program")
    replica.terminate()
    thread.join(WAIT_S)
    (result,) = results
    assert isinstance(result, shell.Completed) and result.code == 137, result


def test_a_connection_that_is_cut(cluster: Cluster, pod: str, tmp_path: Path):
    """By a proxy on the way that closes both sides when the program has printed."""
    import socket
    from urllib.parse import urlsplit

    port = urlsplit(cluster.url).port

    def relay(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            threading.Thread(target=copy, args=(client, server), daemon=True).start()
            seen = b""
            while b"printed" not in seen:
                data = server.recv(1 << 16)
                seen += data
                client.sendall(data)
            for end in (client, server):
                end.shutdown(socket.SHUT_RDWR)

    def copy(client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                server.sendall(data)
        except OSError:
            pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = json.loads(cluster.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        thread = threading.Thread(target=relay, args=(listener,))
        thread.start()
        api = KubeApi(str(tmp_path / "kubeconfig"), None)
        path = channel.exec_path(
            "default", pod, "node", ["sh", "-c", "echo printed; sleep 600"], stdin=False, terminal=False
        )
        with pytest.raises(Unreachable, match="was lost before the command ended"):
            shell.call(shell.Shell(stream=lambda *streams: channel.run(api, path, *streams)))
        thread.join(WAIT_S)


TERMINAL = """
import sys
from cloudtrain.backends.kubernetes import channel
from cloudtrain.backends.kubernetes.client import KubeApi
from cloudtrain.cli.view.terminal import raw_mode
path = channel.exec_path("default", {pod!r}, "node", ["sh"], stdin=True, terminal=True)
with raw_mode():
    code = channel.run(KubeApi({config!r}, None), path, 0, 1, 2, True)
sys.exit(code)
"""


def test_a_terminal_with_its_size_and_ctrl_c(cluster: Cluster, pod: str):
    from tests.cli.test_inside import Terminal

    script = TERMINAL.format(pod=pod, config=str(cluster.kubeconfig))
    terminal = Terminal([sys.executable, "-c", script], rows=33, columns=111)
    terminal.type("test -t 2 && stty size\n")
    terminal.until("33 111")
    terminal.resize(44, 99)  # sent when the client has noticed it, perhaps behind what is typed next
    terminal.type("until stty size | grep '44 99'; do sleep 0.1; done\n")
    terminal.until("(?<!')44 99")  # not in the echo of what was typed; the prompt may stand before it
    # the child says that it runs: before that, Ctrl-C reaches the shell alone, which then waits for the child
    terminal.type("sh -c 'echo be\"\"gun; exec sleep 600'; echo not-printed\n")
    terminal.until("begun")
    terminal.type("\x03")
    terminal.type("echo co''de=$?\n")
    terminal.until("code=130")
    terminal.type("exit 5\n")
    assert terminal.end() == 5


def test_a_client_that_is_gone_leaves_no_terminal_behind(cluster: Cluster, pod: str):
    from tests.cli.test_inside import Terminal

    script = TERMINAL.format(pod=pod, config=str(cluster.kubeconfig))
    terminal = Terminal([sys.executable, "-c", script], rows=20, columns=80)
    terminal.type("echo pid=$$.\n")
    pid = int(terminal.until(r"pid=\d+\.")[len("pid=") : -1])  # pods are processes of this machine
    assert not has_ended(pid)
    os.kill(terminal._pid, signal.SIGKILL)
    terminal.end()
    wait_for(lambda: has_ended(pid), "the end of the shell")


def test_a_client_that_is_killed_with_unread_data_ends_the_messages():
    """Its connection is reset then, where another client's is only at its end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as read:
            connection.sendall(b"never read")
            wait_for(lambda: select.select([client], [], [], 0)[0], "the data")
            client.close()
            assert list(Frames(connection, read).messages()) == []


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
