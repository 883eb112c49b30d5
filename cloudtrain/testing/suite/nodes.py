"""Several nodes: ranks, a failing node, a collective."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from cloudtrain.backends.api import Backend
from cloudtrain.events import State
from cloudtrain.testing.fixtures import ContractFixtures

# The service tells where it is and kills itself when it is asked to; the main role asks before and after.
COLOCATED = """
import os, signal, socket, time
if os.environ['CLOUDTRAIN_ROLE'] == 'server':
    server = socket.create_server(('', PORT))
    while True:
        connection = server.accept()[0]
        word = connection.recv(8)
        if word == b'die':
            os.kill(os.getpid(), signal.SIGKILL)
        connection.sendall(f'{socket.gethostname()} {os.getpid()}'.encode() if word else b'')
        connection.close()
def ask(word):
    try:
        with socket.create_connection((os.environ['CLOUDTRAIN_ROLE_SERVER_HOST'], PORT)) as connection:
            connection.sendall(word)
            return connection.makefile().read().split()
    except OSError:
        return []
host, process = ask(b'who')
ask(b'die')
while not (answer := ask(b'who')):
    time.sleep(0.1)
print('the same host', answer[0] == host == socket.gethostname(), end=', ')
print('another process', answer[1] != process, flush=True)
"""


class NodesContract(ContractFixtures):
    """What a backend with `num_nodes` promises."""

    def test_ranks_over_two_nodes(self, backend: Backend, start: Any) -> None:
        self.require(backend, "num_nodes")
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK"
        script = f"import json, os\nprint(json.dumps([int(os.environ[n]) for n in '{names}'.split()]))\n"
        handle = start(script, num_nodes=2, processes_per_node=2)
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        seen = sorted((line.node, line.rank, *json.loads(line.text)) for line in self.script_lines(backend, handle))
        assert seen == [(0, 0, 0, 0, 4, 2, 0), (0, 1, 1, 1, 4, 2, 0), (1, 2, 2, 0, 4, 2, 1), (1, 3, 3, 1, 4, 2, 1)]

    def test_one_failing_node_ends_the_attempt(self, backend: Backend, start: Any) -> None:
        self.require(backend, "num_nodes")
        handle = start(
            "import os, sys, time\nif os.environ['NODE_RANK'] == '1': sys.exit(23)\ntime.sleep(600)\n", num_nodes=2
        )
        status = self.until_final(backend, handle)
        assert (status.state, status.exit_code) == (State.FAILED, 23), self.text(backend, handle)
        self.assert_no_leftovers(handle)

    def test_a_service_beside_the_main_role(self, backend: Backend, start: Any) -> None:
        self.require(backend, "num_nodes")
        with socket.socket() as held:  # whoever asks for any port is not given this one, whoever names it is
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
            port = int(held.getsockname()[1])
            script = (
                "import os, socket\n"
                "if os.environ['CLOUDTRAIN_ROLE'] == 'server':\n"
                f"    server = socket.create_server(('', {port}))\n"
                "    while True:\n"
                "        server.accept()[0].sendall(b'weights')\n"
                f"with socket.create_connection((os.environ['CLOUDTRAIN_ROLE_SERVER_HOST'], {port})) as connection:\n"
                "    print('received', connection.makefile().read(7), flush=True)\n"
            )
            server = {"entrypoint": "script.py", "ready": f"tcp://:{port}"}
            handle = start(script, roles={"trainer": {"after": ["server"]}, "server": server})
            assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
            received = [
                (line.node, line.text) for line in self.script_lines(backend, handle) if "received" in line.text
            ]
        assert received == [(0, "received weights")]
        self.assert_no_leftovers(handle)

    def test_a_killed_service_on_the_node_of_the_main_role_is_started_again_there(
        self, backend: Backend, start: Any
    ) -> None:
        self.require(backend, "roles.colocate")
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
            port = int(held.getsockname()[1])
            server = {"entrypoint": "script.py", "ready": f"tcp://:{port}", "colocate": "trainer"}
            script = COLOCATED.replace("PORT", str(port))
            handle = start(script, roles={"trainer": {"after": ["server"]}, "server": server})
            assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
            received = [(line.node, line.text) for line in self.script_lines(backend, handle)]
        assert received == [(0, "the same host True, another process True")]
        self.assert_no_leftovers(handle)

    @pytest.mark.train
    def test_a_collective_over_two_nodes(self, backend: Backend, start: Any) -> None:
        self.require(backend, "num_nodes")
        script = (
            "import torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "rank, world = dist.get_rank(), dist.get_world_size()\n"
            "value = torch.tensor([10.0 ** rank])\n"
            "dist.all_reduce(value)\n"
            "print('result', rank, world, value.item(), flush=True)\n"
            "dist.destroy_process_group()\n"
        )
        handle = start(script, num_nodes=2, processes_per_node=2, env={"OMP_NUM_THREADS": "1"})
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        results = sorted(line.text for line in self.script_lines(backend, handle) if line.text.startswith("result"))
        assert results == [f"result {rank} 4 1111.0" for rank in range(4)]
