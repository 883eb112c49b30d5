"""Scripts of TensorFlow, JAX and Keras on two nodes: as the page says, and equal to the framework's own launch."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from cloudtrain.runs.run import Run
from tests.backends.results.places import open_place
from tests.conftest import WAIT_S
from tests.lab.environments import make_environment
from tests.test_task_pages import DOCS, blocks

PLACES = ("local", "ssh", "slurm", "kubernetes")


class Framework(NamedTuple):
    """The packages of an environment, what a script prints at its end, and the variables of the framework's own launch."""

    packages: tuple[str, ...]
    last: str
    variables: dict[str, str]
    env: dict[str, str] = {}


CASES = {
    "jax": Framework(
        ("jax==0.10.2",), r"2 processes, loss (\S+)",
        {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://FIRST", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "RANK",
         "OMPI_COMM_WORLD_LOCAL_RANK": "0", "JAX_COORDINATOR_ADDRESS": "FIRST"},
    ),
    "tensorflow": Framework(
        ("tensorflow-cpu==2.21.0",), r"2 workers, loss (\S+)",
        {"TF_CONFIG": '{"cluster": {"worker": ["FIRST", "SECOND"]}, "task": {"type": "worker", "index": RANK}}'},
    ),
    "keras": Framework(
        ("jax==0.10.2", "keras==3.15.1"), r"2 devices, loss (\S+)",
        {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "FIRST", "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
         "KERAS_DISTRIBUTION_PROCESS_ID": "RANK", "RANK": "RANK"},
        {"KERAS_BACKEND": "jax"},
    ),
}  # fmt: skip


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(each)}" for name, each in value.items()) + "}"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def hold() -> socket.socket:
    """Return a bound socket that does not listen, as the fixture `held` gives one."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    return one


def own_launch(python: Path, script: Path, case: Framework) -> str:
    """Start two processes as the framework's documentation says, and return the loss that both print."""
    ports, ranks = [hold(), hold()], []  # as a launcher keeps them for its ranks
    first, second = (f"127.0.0.1:{port.getsockname()[1]}" for port in ports)
    for rank in range(2):
        values = {
            name: text.replace("FIRST", first).replace("SECOND", second).replace("RANK", str(rank))
            for name, text in case.variables.items()
        }
        env = {**os.environ, **case.env, **values}
        ranks.append(subprocess.Popen([python, script], env=env, stdout=subprocess.PIPE, text=True))
    losses = {re.findall(case.last, rank.communicate(timeout=WAIT_S)[0])[-1] for rank in ranks}
    for port in ports:
        port.close()
    assert len(losses) == 1
    return losses.pop()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", PLACES)
def test_two_nodes_train_as_the_framework_itself_does(
    name: str, place: str, tmp_path: Path, home: Path, request: pytest.FixtureRequest, cli, monkeypatch
):
    case, page = CASES[name], blocks(DOCS / "how" / "frameworks.md")
    monkeypatch.setenv("XDG_CACHE_HOME", sys.prefix)  # which hosts of the lab see, unlike this user's home
    python = make_environment(name, case.packages)
    source = tmp_path / "source"
    source.mkdir()
    script = source / f"train_{name}.py"
    script.write_text(next(block.text for block in page if block.title == script.name))
    command = shlex.split(next(block.text for block in page if block.kind == "bash" and script.name in block.text))
    monkeypatch.chdir(source)
    with open_place(place, request) as at:
        options = {**at.options, "python": str(python)}
        if place == "ssh":
            options["hosts"] = [{"address": host.address} for host in request.getfixturevalue("lab").hosts[:2]]
        target = {"backend": place, **options, **({"defaults": {"output": at.output}} if at.output else {})}
        (source / "cloudtrain.toml").write_text(f"targets.mine = {toml(target)}\n")
        code, shown, errors = cli(*command[1:], "-t", "mine")
        assert code == 0, shown + errors
        lines = [(line.rank, re.findall(case.last, line.text)) for line in Run.find().logs()]
    losses = {rank: found[0] for rank, found in lines if found}
    assert losses.keys() == {0, 1} and set(losses.values()) == {own_launch(python, script, case)}
