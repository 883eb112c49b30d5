"""Whatever a credential chain raises is an error of that attempt, at every call of a backend; nothing prompts unasked."""

from __future__ import annotations

import builtins
import getpass
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3")

import botocore.exceptions
import google.auth.exceptions

from cloudtrain.backends.api import Backend, Plan
from cloudtrain.backends.aws import Aws, AwsUnreachable
from cloudtrain.backends.aws_credentials import CACHE
from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.errors import BackendError, CloudtrainError
from cloudtrain.history.store import Store
from cloudtrain.job.job import Job
from cloudtrain.nodes.process import Process
from cloudtrain.runs.remove import remove
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.source.bundle import Bundle
from cloudtrain.testing.clock import VirtualClock
from tests.backends.test_http import send, serving

ARN = "arn:aws:sagemaker:us-east-1:123456789012:training-job/run-a1"
NAME = "projects/p/locations/us-central1/customJobs/1"
PLACES: dict[str, dict[str, Any]] = {
    "sagemaker": {
        **{"role": "arn:aws:iam::123456789012:role/r", "bucket": "bucket", "region": "us-east-1", "image": "i:1"},
        "client": "boto3",
    },
    "vertex": {"project": "p", "bucket": "bucket", "image": "i:1", "client": "rest"},
}


ARGS: tuple[tuple[Any, ...], ...] = (
    *((), ("text",), ({"Error": {"Code": "X", "Message": "m"}}, "Operation")),
    *(
        ("utf-8", b"x", 0, 1, "reason"),
        ("utf-8", "x", 0, 1, "reason"),
        ("x", 0, 1, "reason"),
        ("text", [ValueError()]),
        ("x", "y", {}),
    ),
)
WORDS = dict.fromkeys(
    ("error", "msg", "error_msg", "provider", "endpoint_url", "profile", "proxy_url", "operation_name"), "w"
)


def exceptions() -> Iterator[Exception]:
    """Yield one exception of every class that Python, botocore and google-auth define."""
    for module in (builtins, botocore.exceptions, google.auth.exceptions):
        for kind in vars(module).values():
            if inspect.isclass(kind) and issubclass(kind, Exception) and not issubclass(kind, Warning):
                yield _made(kind)


def _made(kind: type[Exception]) -> Exception:
    for args in ARGS:
        with suppress(Exception):
            return kind(*args)
    words = dict(WORDS)
    for _ in range(9):  # botocore's texts have places for words
        try:
            return kind(**words)
        except KeyError as missing:
            words[str(missing.args[0])] = "word"
    raise AssertionError(kind)


class Chain:
    """Credentials of both clouds that raise what they were given."""

    access_key = secret_key = token = None
    method, valid, account_id = "plugin", False, None
    error: Exception = EOFError()

    def get_frozen_credentials(self) -> Any:
        raise self.error

    def get_deferred_property(self, name: str) -> Callable[[], object]:
        return lambda: getattr(self.get_frozen_credentials(), name)

    def refresh(self, _: object) -> None:
        raise self.error


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Chain:
    import google.auth
    from botocore.retries import standard
    from botocore.session import Session

    made = Chain()
    monkeypatch.setattr(Session, "get_credentials", lambda _: made)
    monkeypatch.setattr(google.auth, "default", lambda **_: (made, "p"))
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    return made


def made(name: str, folder: Path) -> tuple[Backend, Plan, Bundle]:
    source = folder / "source"
    source.mkdir()
    (source / "train.py").write_text("print(1)\n")
    bundle = Bundle.make(source, folder / "bundles")
    kind: Any = {"sagemaker": SagemakerBackend, "vertex": VertexBackend}[name]
    backend = kind(PLACES[name], folder / "runs", clock=VirtualClock())
    return (
        backend,
        backend.plan(Job.from_dict({"source": str(source), "entrypoint": "train.py"}), bundle, "run"),
        bundle,
    )


def calls(backend: Backend, plan: Plan, bundle: Bundle, folder: Path) -> dict[str, Callable[[], object]]:
    handle = ARN if backend.name == "sagemaker" else NAME
    return {
        "preflight": lambda: backend.preflight(plan),
        "submit": lambda: backend.submit(plan, bundle),
        "find": lambda: backend.find("run-a1"),
        "discard": lambda: backend.discard("run-a1"),
        "status": lambda: backend.status(handle),
        "statuses": lambda: backend.statuses([handle]),
        "logs": lambda: list(backend.logs(handle)),
        "cancel": lambda: backend.cancel(handle),
        "fetch": lambda: backend.fetch(handle, folder / "out"),
        "images": lambda: backend.images(handle),
        "labels": lambda: backend.labels(handle),
        "labelled": lambda: list(backend.labelled("a", "b", ())),
        "remains": lambda: backend.remains(handle),
        "remove": lambda: backend.remove(handle),
        "shell": lambda: backend.shell(handle, 0, [], stdin=False, terminal=False),
        "check": backend.check,
        "discover": backend.discover,
    }


@pytest.mark.parametrize("step", [9, 1])
@pytest.mark.parametrize("name", PLACES)
def test_every_exception_at_every_call_is_an_error_of_the_attempt(
    name: str, step: int, chain: Chain, tmp_path: Path
) -> None:
    raised = list(exceptions())
    assert len(raised) > 150 and {EOFError, OSError, KeyError} <= {type(error) for error in raised}
    backend, plan, bundle = made(name, tmp_path)
    asked = set()
    for number, (call, ask) in enumerate(calls(backend, plan, bundle, tmp_path).items()):
        for chain.error in raised[number % step :: step]:
            try:
                ask()
            except CloudtrainError as error:
                assert isinstance(error, BackendError) and error.message and "\n" not in error.message, (
                    call,
                    chain.error,
                )
                assert error.hint or "refused" in error.message or "rejects" in error.message, (
                    call,
                    chain.error,
                    error.message,
                )
                asked.add(call)
    assert asked >= {"preflight", "submit", "find", "status", "logs", "cancel", "labels", "labelled", "remains"}


def test_an_error_of_the_chain_after_a_sent_request_is_no_refusal(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.credentials import ReadOnlyCredentials

    answers = iter([ReadOnlyCredentials("key", "secret", None, None)])

    def frozen() -> ReadOnlyCredentials:
        for answer in answers:
            return answer
        raise EOFError

    chain.get_frozen_credentials = frozen  # type: ignore[method-assign]
    with serving(lambda handler: send(handler, 500)) as (url, received):
        aws = Aws("sagemaker", "us-east-1", None, url, VirtualClock())
        with pytest.raises(AwsUnreachable, match="EOFError"):
            aws.call("sagemaker", "describe_training_job", TrainingJobName="a")
    assert len(received) == 1


PROFILE = """
[profile mfa]
role_arn = arn:aws:iam::123456789012:role/team
mfa_serial = arn:aws:iam::123456789012:mfa/me
source_profile = keys
[profile over-mfa]
role_arn = arn:aws:iam::123456789012:role/over
source_profile = mfa
[profile role]
role_arn = arn:aws:iam::123456789012:role/team
source_profile = keys
[profile keys]
aws_access_key_id = AKIA
aws_secret_access_key = secret
"""


@pytest.fixture
def mfa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile that asks for a code, and a home folder with no credentials kept."""
    (tmp_path / "config").write_text(PROFILE)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Requests to a service that gives every role its credentials."""
    role = (
        "<Credentials><AccessKeyId>ASIA</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
    )
    role += "<Expiration>2100-01-01T00:00:00Z</Expiration></Credentials><AssumedRoleUser><Arn>arn:aws:sts::1:a/b</Arn>"
    body = f"<AssumeRoleResponse><AssumeRoleResult>{role}</AssumedRoleUser></AssumeRoleResult></AssumeRoleResponse>"
    with serving(lambda handler: send(handler, 200, body.encode())) as (url, received):
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        yield received


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts of a user who types every code."""
    asked: list[str] = []
    monkeypatch.setattr(getpass, "getpass", lambda prompt: asked.append(prompt) or "123456")
    return asked


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda _: True})())


def check(profile: str) -> None:
    """Check a profile's credentials as a new process does, twice."""
    aws = Aws("sagemaker", "us-east-1", profile, None, VirtualClock())
    aws.check_credentials()
    aws.check_credentials()


def test_a_command_without_a_terminal_asks_for_no_code(mfa: Path, prompts: list[str]) -> None:
    aws = Aws("sagemaker", "us-east-1", "mfa", None, VirtualClock())
    with pytest.raises(BackendError, match="asks for a code") as caught:
        aws.call("sagemaker", "describe_training_job", TrainingJobName="a")
    assert caught.value.hint.endswith("aws sts get-caller-identity --profile mfa")
    with pytest.raises(BackendError, match="asks for a code"):
        aws.check_credentials()
    assert prompts == []


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("profile", "roles"), [("mfa", 1), ("over-mfa", 2)])
def test_a_code_that_was_typed_once_holds_in_the_cache_of_the_aws_cli(
    profile: str, roles: int, mfa: Path, prompts: list[str], sts: list[Any]
) -> None:
    check(profile)
    assert len(prompts) == 1 and len(sts) == roles
    check(profile)  # as the watcher does
    assert len(prompts) == 1 and len(sts) == roles
    kept = list((mfa / CACHE).iterdir())
    assert [file.stat().st_mode & 0o777 for file in kept] == [0o600] * roles


def test_credentials_of_a_role_without_a_code_are_in_memory_alone(mfa: Path, sts: list[Any]) -> None:
    check("role")
    assert len(sts) == 1 and not (mfa / ".aws").exists()


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("profile", ["mfa", "role"])
@pytest.mark.parametrize("user", ["cannot write", "has no home"])
def test_a_role_needs_no_home_folder(
    user: str, profile: str, mfa: Path, prompts: list[str], sts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(mfa / "config" / "below-a-file"))
    if user == "has no home":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    check(profile)
    assert len(sts) == 1 and len(prompts) == (profile == "mfa")


@pytest.mark.usefixtures("terminal")
def test_a_broken_file_of_the_cache_is_written_again(mfa: Path, prompts: list[str], sts: list[Any]) -> None:
    check("mfa")
    (kept,) = (mfa / CACHE).iterdir()
    whole = kept.read_text()
    kept.write_text(whole[:20])
    check("mfa")
    assert json.loads(kept.read_text()).keys() == json.loads(whole).keys() and len(prompts) == len(sts) == 2


def test_an_attempt_whose_account_cannot_be_asked_blocks_no_home(mfa: Path, home: Path) -> None:
    place = {**PLACES["sagemaker"], "profile": "mfa"}
    source = mfa / "source"
    source.mkdir()
    (source / "train.py").write_text("print(1)\n")
    job = {"source": str(source), "entrypoint": "train.py", "options": {"sagemaker": place}}
    plan = SagemakerBackend(place, home / "runs").plan(
        Job.from_dict(job), Bundle.make(source, home / "bundles"), "blocked-run"
    )
    store = Store(home)
    assert store.intend(plan, identity="i", owner=replace(Process.here(), started="0"))
    run, errors = Run("blocked-run", store, watch=False), []
    run.refresh(errors.append)
    assert ["asks for a code (MFA)" in error.message for error in errors] == [True]

    submitter = Submitter("local", watch=False)
    (source / "job.yaml").write_text("entrypoint: train.py\n")
    resolved = submitter.resolve(str(source / "job.yaml"))
    package = submitter.package(resolved)
    assert submitter.adopt_interrupted(submitter.plan_of(resolved, package), None, adopt=False) is None
    assert len(submitter.notes) == 1 and "blocked-run" in submitter.notes[0]

    run.cancel()
    assert run.record.cancel_requested and not run.record.status.state.final
    remove(run, here=True, force=True)  # the command that `cancel` names
    assert store.get("blocked-run") is None
