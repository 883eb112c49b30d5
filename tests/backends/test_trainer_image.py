"""The trainer's image: built, pushed to a real registry on loopback, its digest written into the target."""

from __future__ import annotations

import base64
import io
import os
import re
import shutil
import socket
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.backends import docker, images, trainer_image
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.sagemaker import ecr
from cloudtrain.cli import main
from cloudtrain.errors import BackendError, BadRequest
from cloudtrain.job import targets
from cloudtrain.simulators.sagemaker.server import ACCOUNT, REGION
from tests.backends.sagemaker.test_backend import Simulator, simulator  # noqa: F401 - a fixture
from tests.conftest import require, wait_for

HOST = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
BCRYPT = "$2b$04$4s9BWOmfPoKC6Ce69kxn/.q/NUaiG03XvgWrDQ8FQoN/KVIKdzftO"
TINY = "cloudtrain-tiny:test"
CONFIG = """\
# our targets
[targets.prod]
backend = "kubernetes"   # the cluster in Frankfurt
image = 'old:1'  # of last week

# tried by hand
[targets.other]
backend = "slurm"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / targets.CONFIG_FILE).write_text(CONFIG)
    return tmp_path / targets.CONFIG_FILE


@pytest.fixture
def image() -> Iterator[str]:
    """A tiny image; needs a Docker engine, which CLOUDTRAIN_REQUIRE may demand (make test-docker)."""
    try:
        docker.call("version", "--format", "{{.Server.Version}}")
    except BackendError as error:
        if "docker" in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","):
            pytest.fail(str(error))
        pytest.skip(str(error))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("hello"))
    subprocess.run(["docker", "import", "-", TINY], input=archive.getvalue(), check=True, capture_output=True)
    yield TINY
    docker.call("rmi", "--force", TINY)


@pytest.fixture
def hub(tmp_path: Path, held: socket.socket, request: pytest.FixtureRequest) -> Iterator[str]:
    """Debian's docker-registry on loopback; the parameter is the password of the user AWS, "" for none."""
    require("docker-registry")
    program = str(shutil.which("docker-registry"))
    address = f"127.0.0.1:{held.getsockname()[1]}"
    password = getattr(request, "param", "")
    lines = [
        "version: 0.1",
        "storage:",
        f"  filesystem: {{rootdirectory: {tmp_path / 'blobs'}}}",
        f"http: {{addr: '{address}'}}",
    ]
    if password:
        assert password == "a-token"  # of which BCRYPT is
        (tmp_path / "users").write_text(f"AWS:{BCRYPT}\n")
        lines.append(f"auth: {{htpasswd: {{realm: test, path: {tmp_path / 'users'}}}}}")
    (tmp_path / "registry.yml").write_text("\n".join(lines))
    server = subprocess.Popen([program, "serve", str(tmp_path / "registry.yml")], stderr=subprocess.DEVNULL)

    def answers() -> bool:
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", int(address.partition(":")[2]))) == 0

    try:
        wait_for(answers, "the registry")
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.mark.docker
def test_the_digest_that_the_registry_has_is_written(image: str, hub: str, project: Path, capsys) -> None:
    assert main(["image", "push", "-t", "prod", "--image", image, "--to", f"{hub}/team/trainer:7"]) == 0
    manifests = f"http://{hub}/v2/team/trainer/manifests/7"
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    head = urllib.request.Request(manifests, method="HEAD", headers={"Accept": kind})
    with urllib.request.urlopen(head, timeout=60) as answer:
        digest = answer.headers["Docker-Content-Digest"]
    pinned = f"{hub}/team/trainer@{digest}"
    assert project.read_text() == CONFIG.replace("'old:1'", f'"{pinned}"')
    assert f'image = "{pinned}" is written to [targets.prod] in {project}' in capsys.readouterr().out
    docker.call("rmi", "--force", f"{hub}/team/trainer:7")
    docker.call("pull", "--quiet", pinned)
    docker.call("rmi", "--force", pinned)


@pytest.mark.docker
@pytest.mark.parametrize("hub", ["a-token"], indirect=True)
def test_docker_is_logged_in_first(image: str, hub: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    place = f"{hub}/cloudtrain-train:gpu"
    with pytest.raises(BackendError, match="no basic auth credentials|unauthorized"):
        trainer_image.push(image, place, None, print)
    with pytest.raises(BackendError, match="docker login failed: .*401"):
        trainer_image.push(image, place, images.ImageRegistry(hub, "AWS", "another"), print)
    pinned = trainer_image.push(image, place, images.ImageRegistry(hub, "AWS", "a-token"), print)
    assert re.fullmatch(rf"{hub}/cloudtrain-train@sha256:[0-9a-f]{{64}}", pinned)
    docker.call("rmi", "--force", place)


@pytest.mark.docker
def test_what_docker_refuses_is_one_sentence_and_the_target_stays(image: str, hub: str, project: Path, capsys) -> None:
    assert main(["image", "push", "-t", "prod", "--image", "not-here:1", "--to", f"{hub}/a:1"]) == 5
    assert "docker tag failed: No such image: not-here:1" in capsys.readouterr().err
    assert project.read_text() == CONFIG


def test_the_repository_of_ecr_is_made_once_with_a_login(simulator: Simulator, home: Path) -> None:  # noqa: F811
    aws = Aws("sagemaker", REGION, None, simulator.url)
    for made in (1, 1):
        login = ecr.prepare_push(aws, "cloudtrain-train")
        assert (login.host, login.user) == (HOST, "AWS") and login.password
        assert login.password not in repr(login)
        assert simulator.calls.count("ecr:CreateRepository") == made
    named = simulator.call("ecr", "describe_repositories")["repositories"]
    assert [each["repositoryName"] for each in named] == ["cloudtrain-train"]


# What docker prints when it pushes; each call is kept with what it read.
DOCKER = """#!/bin/sh
{ echo "$@"; [ "$1" != login ] || { cat; echo; }; } >>"$0.calls"
[ "$1" != push ] || echo "7: digest: sha256:DIGEST size: 528"
"""


def test_one_command_makes_the_repository_logs_in_pushes_and_writes_the_digest(
    simulator: Simulator,  # noqa: F811
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No registry answers under ECR's name here, so a stand-in takes docker's commands."""
    lines = ["[targets.prod]", 'backend = "sagemaker"', f'region = "{REGION}"', f'endpoint = "{simulator.url}"']
    project.write_text("\n".join(lines))
    program = project.parent / "docker"
    program.write_text(DOCKER.replace("DIGEST", "ab" * 32))
    program.chmod(0o755)
    monkeypatch.setattr("cloudtrain.backends.docker.PROGRAM", str(program))
    assert main(["image", "push", "-t", "prod", "--image", "team/trainer:7"]) == 0, capsys.readouterr()
    token = simulator.call("ecr", "get_authorization_token")["authorizationData"][0]["authorizationToken"]
    password = base64.b64decode(token).decode().removeprefix("AWS:")
    place = f"{HOST}/cloudtrain-train:7"
    said = [f"tag team/trainer:7 {place}", f"login --username AWS --password-stdin {HOST}", password, f"push {place}"]
    assert Path(f"{program}.calls").read_text().split("\n") == [*said, ""]
    assert "ecr:CreateRepository" in simulator.calls
    pinned = f"{HOST}/cloudtrain-train@sha256:{'ab' * 32}"
    assert project.read_text() == "\n".join([*lines, f'image = "{pinned}"', ""])
    assert pinned in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["push"], 2, "image push needs a target (add -t TARGET"),
        (["push", "-t", "nowhere"], 2, "nowhere"),
        (["push", "-t", "kubernetes"], 2, "target kubernetes is not in cloudtrain.toml"),
        (["push", "-t", "other"], 2, "target other: the backend slurm has no option image"),
        (["push", "-t", "prod"], 2, "the backend kubernetes has no registry of its own (add --to"),
        (
            ["push", "-t", "prod", "--to", "127.0.0.1:1/a:1"],
            5,
            "Docker is not installed on this machine (install Docker",
        ),
        (["build"], 5, "Docker is not installed on this machine (install Docker"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(words, code, message, project: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("cloudtrain.backends.docker.PROGRAM", "no-such-docker")
    assert main(["image", *words]) == code
    printed = " ".join(capsys.readouterr().err.replace("hint: ", "(").split())
    assert message.replace(" (", " (") in printed and "Traceback" not in printed
    assert project.read_text() == CONFIG


def test_an_engine_that_does_not_answer_is_named(tmp_path: Path, monkeypatch) -> None:
    require("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing")
    with pytest.raises(BackendError, match="Docker's engine does not answer"):
        trainer_image.build("cpu")


def test_an_installed_package_says_that_it_holds_no_image_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trainer_image, "SCRIPT", tmp_path / "images" / "build.sh")
    with pytest.raises(BadRequest, match="only be built in a checkout of cloudtrain"):
        trainer_image.build("gpu")


@pytest.mark.docker
def test_a_sagemaker_target_is_pushed_to_its_accounts_registry(
    image: str,
    simulator: Simulator,  # noqa: F811
    project: Path,
    capsys,
) -> None:
    """No registry answers under ECR's name here: docker's login is refused, after moto has made the repository."""
    lines = ["[targets.prod]", 'backend = "sagemaker"', f'region = "{REGION}"', f'endpoint = "{simulator.url}"']
    project.write_text("\n".join(lines))
    assert main(["image", "push", "-t", "prod", "--image", image]) == 5
    printed = capsys.readouterr().err
    assert "docker login failed: " in printed and "Traceback" not in printed
    assert {"ecr:CreateRepository", "ecr:GetAuthorizationToken"} <= set(simulator.calls)
    assert docker.call("image", "ls", "--quiet", f"{HOST}/cloudtrain-train:test").strip()
    docker.call("rmi", "--force", f"{HOST}/cloudtrain-train:test")
    assert project.read_text() == "\n".join(lines)
