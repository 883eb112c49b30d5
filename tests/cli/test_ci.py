"""`cloudtrain init --ci`: the vendors' schemas and zizmor accept what it writes, and its steps run."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import yaml

from cloudtrain.backends import registry
from cloudtrain.cli import main
from cloudtrain.cli.view import ci
from cloudtrain.events import State
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S, wait_for

BIN = Path(sys.executable).parent
PLACES = {
    "sagemaker": ci.Place("sagemaker", {"account": "123456789012", "region": "eu-west-1"}, pinned_policy=True),
    "vertex": ci.Place("vertex", {"project": "acme"}),
    "azureml": ci.Place("azureml", {}),
    "kubernetes": ci.Place("kubernetes", {"server": "https://1.2.3.4", "context": "prod"}, "cloudtrain==0.1.0"),
    "local": ci.Place("local"),
}
SCHEMAS = {"github": "vendor.github-workflows", "gitlab": "vendor.gitlab-ci"}


def check(system: str, texts: dict[Path, str]) -> tuple[int, str]:
    """Return the exit code and output of the vendor's schema, and for GitHub of zizmor; each text is of a folder of its own."""
    paths = [folder / ci.PATHS[system] for folder in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = [str(BIN / "check-jsonschema"), "--builtin-schema", SCHEMAS[system], *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode or system == "gitlab":
        return done.returncode, done.stdout
    words = [str(BIN / "zizmor"), "--offline", "--no-progress", *map(str, texts)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("system", ci.PATHS)
def test_schemas_and_zizmor_accept_it(system: str, tmp_path: Path):
    texts = {tmp_path / backend: place.build(system, "job.yaml") for backend, place in PLACES.items()}
    code, said = check(system, texts)
    assert code == 0, said
    assert [name for name, text in texts.items() if "secret" in text.lower()] == [], "no long-lived key"


def test_the_checkers_find_what_is_wrong(tmp_path: Path):
    good = PLACES["sagemaker"].build("github", "job.yaml")
    for fault in (
        (re.search(r"aws-actions/\S+", good)[0], "aws-actions/configure-aws-credentials@v6.2.3"),
        ("runs-on: ubuntu-latest", "run-on: ubuntu-latest"),
        ('--key "$COMMIT"', "--key ${{ github.head_ref }}"),
    ):
        assert fault[0] in good
        assert check("github", {tmp_path: good.replace(*fault)})[0] != 0, fault
    good = PLACES["sagemaker"].build("gitlab", "job.yaml")
    assert check("gitlab", {tmp_path: good.replace("when: always", "when: often")})[0] != 0


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a repository with the branches main and change; change is checked out."""
    origin, folder = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    for name, value in (
        ("GIT_AUTHOR_NAME", "a"),
        ("GIT_AUTHOR_EMAIL", "a@b"),
        ("GIT_COMMITTER_NAME", "a"),
        ("GIT_COMMITTER_EMAIL", "a@b"),
    ):
        monkeypatch.setenv(name, value)
    (origin / "train.py").write_text(
        "import sys, time\nprint('loss=0.5', flush=True)\ntime.sleep(float(sys.argv[2]))\n"
    )
    job = "name: ci\nentrypoint: train.py\nhyperparameters: {wait: 0}\nresources: {usd_per_hour: 2}\nlimits: {max_runtime: 1h}\n"
    (origin / "job.yaml").write_text(job)

    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=origin, check=True, timeout=60, capture_output=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    subprocess.run(["git", "clone", "-q", str(origin), str(folder)], check=True, timeout=60)
    (folder / "job.yaml").write_text(job.replace("1h", "4h").replace("wait: 0", "wait: 0.0"))
    monkeypatch.chdir(folder)
    assert main(["init", "--ci", "github"]) == 0 and main(["init", "--ci", "gitlab"]) == 0
    do("git add -A && git commit -q -m change", {})
    return folder


def steps(folder: Path, system: str, job: str) -> list[str]:
    """Return the shell texts of a job, without the installation."""
    made = yaml.safe_load((folder / ci.PATHS[system]).read_text())
    if system == "github":
        found = [step["run"] for step in made["jobs"][job]["steps"] if "run" in step]
    else:
        found = [made[job][part] for part in ("before_script", "script", "after_script") if part in made[job]]
        found = ["\n".join(part) for part in found]
    return [re.sub(r"^pip install .*$", "true", text, flags=re.MULTILINE) for text in found]


def shell(text: str, env: dict[str, str]) -> subprocess.Popen[str]:
    words = ["bash", "-e", "-o", "pipefail", "-c", text]
    return subprocess.Popen(
        words, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def do(text: str, env: dict[str, str]) -> str:
    process = shell(text, env)
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, (text, out)
    return out


@pytest.mark.parametrize("system", ci.PATHS)
def test_a_change_is_planned_and_compared(system: str, repository: Path, tmp_path: Path):
    temp = tmp_path / "temp"
    temp.mkdir()
    summary = tmp_path / "summary.md"
    env = {
        "BASE": "main",
        "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main",
        "RUNNER_FOLDER": str(temp),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    out = "".join(do(text, env) for text in steps(repository, system, "plan"))
    assert "cost at most 8.02 USD, was 2.02 USD" in out
    assert re.search(r"limits\.max_runtime\s+1h\s+4h", out) and "source_sha256" in out
    assert json.loads((temp / "plan.json").read_text())["job"]["limits"]["max_runtime"] == "4h"
    assert "cost at most" in (temp / "difference.txt").read_text()
    assert system == "gitlab" or "cost at most" in summary.read_text()


@pytest.mark.parametrize("system", ci.PATHS)
@pytest.mark.usefixtures("census")
def test_a_commit_is_trained_once_and_its_report_is_kept(system: str, repository: Path, tmp_path: Path):
    gitlab = repository / ".cloudtrain-ci"  # GitLab keeps files of the checkout alone
    reports = gitlab if system == "gitlab" else tmp_path / "temp"
    reports.mkdir(exist_ok=True)
    env = {"COMMIT": "abc123", "CI_JOB_STATUS": "success", "RUNNER_TEMP": str(reports)}
    texts = [text for text in steps(repository, system, "train") if not text.startswith("cloudtrain cancel")]
    for _ in range(2):
        out = "".join(do(text, env) for text in texts)
    assert "was already submitted" in out or "SUCCEEDED" in out
    assert "<html" in (reports / "report.html").read_text()[:2000].lower()
    assert len(json.loads(do("cloudtrain ls --json", {}))) == 1


@pytest.mark.parametrize("way", ["interrupt", "after"])
@pytest.mark.usefixtures("census")
def test_an_aborted_job_cancels_its_run(way: str, repository: Path):
    """GitHub interrupts the step; GitLab, and a step that was killed, leave it to what runs afterwards."""
    (repository / "job.yaml").write_text((repository / "job.yaml").read_text().replace("0.0", "600"))
    env = {"COMMIT": "abc123", "CI_JOB_STATUS": "canceled"}
    train = next(text for text in steps(repository, "github", "train") if "submit" in text)
    process = shell(train, env)

    def state() -> str:
        runs = json.loads(do("cloudtrain ls --json", {}))
        return runs[0]["state"] if runs else ""

    wait_for(lambda: state() == "RUNNING", "the start")
    if way == "interrupt":
        process.send_signal(signal.SIGINT)
    else:
        process.kill()
        (after,) = (text for text in steps(repository, "gitlab", "train") if "CI_JOB_STATUS" in text)
        do(after, env)
    process.communicate(timeout=WAIT_S)
    wait_for(lambda: state() == "CANCELLED", "the cancel")


def test_cancel_needs_a_run_or_a_key_that_is_there(repository: Path, capsys):
    assert main(["cancel"]) == 2
    assert main(["cancel", "--key", "never"]) == 2
    assert "no run here has the key never" in capsys.readouterr().err


def test_the_run_of_a_key_is_cancelled_from_another_machine(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    monkeypatch.setattr("cloudtrain.runs.sending.handover.start", lambda *_, **__: None)
    MemoryBackend.install()
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print(1)\n")
    Path("job.yaml").write_text("name: one\nentrypoint: train.py\n")
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "runner"))
    assert main(["submit", "job.yaml", "-t", "memory", "--key", "abc"]) == 0
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "laptop"))
    assert main(["cancel", "--key", "abc"]) == 2
    assert "--job JOB" in capsys.readouterr().err
    assert main(["cancel", "--key", "abd", "--job", "job.yaml", "-t", "memory"]) == 2
    assert "no run here or on memory has the key abd" in capsys.readouterr().err
    (attempt,) = MemoryBackend.attempts.values()
    assert attempt.status.state is State.RUNNING
    assert main(["cancel", "--key", "abc", "--job", "job.yaml", "-t", "memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["confirmed"] and attempt.status.state is State.CANCELLED
    assert len(MemoryBackend.attempts) == 1, "nothing was sent"
    assert main(["cancel", "--job", "job.yaml"]) == 2


def test_botocore_takes_the_identity_of_gitlab(tmp_path: Path, monkeypatch):
    import botocore.session

    made = yaml.safe_load(PLACES["sagemaker"].build("gitlab", "job.yaml"))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    token = tmp_path / "token"
    variables: dict[str, Any] = {**made["train"]["variables"], "AWS_WEB_IDENTITY_TOKEN_FILE": str(token)}
    do(made["train"]["before_script"][1], {**variables, "IDENTITY_TOKEN": "a.b.c"})
    assert token.read_text() == "a.b.c" and token.stat().st_mode & 0o077 == 0
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    found = botocore.session.Session().get_credentials()
    assert found is not None and found.method == "assume-role-with-web-identity"


def test_google_auth_takes_the_identity_of_gitlab(tmp_path: Path):
    from google.auth import identity_pool

    variables = yaml.safe_load(PLACES["vertex"].build("gitlab", "job.yaml"))["train"]["variables"]
    config = json.loads(variables["GOOGLE_IDENTITY"])
    (tmp_path / "token").write_text("a.b.c")
    made = identity_pool.Credentials.from_info({**config, "credential_source": {"file": str(tmp_path / "token")}})
    assert made.retrieve_subject_token(None) == "a.b.c"


AZURE = "api://AzureADTokenExchange"


class Issuer(BaseHTTPRequestHandler):
    """GitHub's endpoint for identity tokens: a new token for each request."""

    given = 0

    def do_GET(self) -> None:
        asked = parse_qs(urlparse(self.path).query)
        audience = "".join(asked["audience"])
        if self.headers["Authorization"] != "bearer of-the-job" or audience not in ("kubernetes", AZURE):
            self.send_error(401)
            return
        Issuer.given += 1
        claims = (
            base64.urlsafe_b64encode(json.dumps({"exp": 4102444800, "n": Issuer.given, "aud": audience}).encode())
            .decode()
            .rstrip("=")
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"value": f"a.{claims}.b"}).encode())

    def log_message(self, *_: Any) -> None: ...


def test_the_identity_of_github_is_renewed_for_azure(tmp_path: Path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Issuer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = yaml.safe_load(PLACES["azureml"].build("github", "job.yaml"))["jobs"]["train"]
    (step,) = (step for step in made["steps"] if "identity" in step.get("name", ""))
    text = step["run"].replace("/tmp", str(tmp_path)).replace("sleep(120)", "sleep(0.05)")
    text, loop, _ = text.partition("nohup")
    assert loop and "python3 /tmp/identity.py >" in step["run"].splitlines()[-1]
    env = {name: str(value).replace("/tmp", str(tmp_path)) for name, value in made["env"].items()} | {
        "ACTIONS_ID_TOKEN_REQUEST_URL": f"http://127.0.0.1:{server.server_port}/token?api-version=2",
        "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of-the-job",
    }
    do(text, env)
    token = Path(env["AZURE_FEDERATED_TOKEN_FILE"])
    first = token.read_text()
    claims = first.split(".")[1]
    assert json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["aud"] == AZURE
    assert token.stat().st_mode & 0o077 == 0
    renewing = subprocess.Popen([sys.executable, str(tmp_path / "identity.py")], env={**os.environ, **env})
    try:
        wait_for(lambda: token.read_text() != first)
    finally:
        renewing.kill()
        renewing.wait()
    process = shell(text, {**env, "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of-another"})
    process.communicate(timeout=WAIT_S)
    assert process.returncode, "without a token the step fails"
    server.shutdown()


def test_the_identity_of_gitlab_is_a_file_for_azure(tmp_path: Path):
    made = yaml.safe_load(PLACES["azureml"].build("gitlab", "job.yaml"))["train"]
    assert made["id_tokens"] == {"IDENTITY_TOKEN": {"aud": AZURE}}
    token = tmp_path / "token"
    do(made["before_script"][1], {"IDENTITY_TOKEN": "a.b.c", "AZURE_FEDERATED_TOKEN_FILE": str(token)})
    assert token.read_text() == "a.b.c" and token.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("system", ci.PATHS)
def test_kubernetes_clients_take_the_identity_of_ci(system: str, tmp_path: Path, monkeypatch):
    """The kubeconfig is read by Kubernetes' own client and by ours; the token is a new one each time on GitHub."""
    from kubernetes import config as official

    from cloudtrain.backends.kubernetes import credentials, kubeconfig
    from tests.backends.kubernetes.kubeconfigs import Certificates

    server = ThreadingHTTPServer(("127.0.0.1", 0), Issuer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", f"http://127.0.0.1:{server.server_port}/token?api-version=2")
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "of-the-job")
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    made = yaml.safe_load(PLACES["kubernetes"].build(system, "job.yaml"))
    if system == "github":
        (step,) = (step for step in made["jobs"]["train"]["steps"] if "cluster" in step.get("name", ""))
        env, text = step["env"], step["run"]
    else:
        env, text = made["train"]["variables"], made["train"]["before_script"][1]
    do(text, {**env, "IDENTITY_TOKEN": "a.b.c", "CLUSTER_AUTHORITY": Certificates().data("ca.crt")})
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / ".kube").iterdir()} == {0}
    contexts, active = official.list_kube_config_contexts(str(tmp_path / ".kube" / "config"))
    assert active["name"] == "prod" and len(contexts) == 1
    client = official.new_client_from_config(str(tmp_path / ".kube" / "config"))
    assert client.configuration.host == "https://1.2.3.4"
    (token,) = client.configuration.api_key.values()
    access = kubeconfig.parse_kubeconfig(None, "prod")
    login = credentials.log_in(access)
    ours, until = login.authorization.removeprefix("Bearer "), login.expires_at
    if system == "github":
        assert token.startswith("Bearer a.") and ours != token.removeprefix("Bearer ") and until == 4102444800 - 60
    else:
        assert (token, ours) == ("Bearer a.b.c", "a.b.c")
    server.shutdown()


@pytest.mark.usefixtures("census")
def test_the_loop_over_job_files_submits_all_and_has_the_first_bad_exit_code(project: Path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "how" / "ci.md").read_text()
    (project / "train_all.sh").write_text(page.partition('title="train_all.sh"\n')[2].partition("```")[0])
    (project / "end.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    (project / "jobs").mkdir()
    for name, arguments in {"a-fails": "['3']", "b-ends": "['0']"}.items():
        text = f"name: {name}\nsource: ..\nentrypoint: end.py\nargs: {arguments}\n"
        (project / "jobs" / f"{name}.yaml").write_text(text)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("COMMIT", "abc")
    done = subprocess.run(
        ["sh", "train_all.sh"], cwd=project, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    printed = re.findall(r"^(a-fails|b-ends)-\w+: exit code (\d+)$", done.stdout, re.MULTILINE)
    assert (done.returncode, printed) == (3, [("a-fails", "3"), ("b-ends", "0")]), done.stdout + done.stderr


def test_the_page_lets_this_identity_into_a_cluster():
    import kubernetes_validate

    page = (Path(__file__).parents[2] / "docs" / "how" / "ci.md").read_text()
    files = dict(re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL))
    (trusted,) = yaml.safe_load(files["authentication.yaml"])["jwt"]
    assert trusted["issuer"]["audiences"] == ["kubernetes"] and "audience=kubernetes" in PLACES["kubernetes"].build(
        "github", "job.yaml"
    )
    binding = yaml.safe_load(files["binding.yaml"])
    kubernetes_validate.validate(binding, "1.37", strict=True)
    (rule,) = trusted["claimValidationRules"]
    assert binding["subjects"][0]["name"] == trusted["claimMappings"]["username"]["prefix"] + rule["requiredValue"]


def test_what_ci_installs_is_named(repository: Path, monkeypatch, capsys):
    assert main(["init", "--ci", "github", "--force"]) == 0
    assert "repeat with --wheel" in capsys.readouterr().out
    text = (repository / ci.PATHS["github"]).read_text()
    (install,) = {step["run"] for step in yaml.safe_load(text)["jobs"]["plan"]["steps"] if "pip" in step.get("run", "")}
    process = shell(install, {"CLOUDTRAIN": ""})
    assert "write the address of your wheel" in process.communicate(timeout=WAIT_S)[0] and process.returncode != 0
    assert main(["init", "--ci", "github", "--force", "--wheel", "https://w/c.whl"]) == 0
    assert 'CLOUDTRAIN: "https://w/c.whl"' in (repository / ci.PATHS["github"]).read_text()
    noted = {"url": "https://git.acme.example/c", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    monkeypatch.setattr("importlib.metadata.PathDistribution.read_text", lambda *_: json.dumps(noted))
    assert main(["init", "--ci", "github", "--force"]) == 0
    assert 'CLOUDTRAIN: "git+https://git.acme.example/c@abc"' in (repository / ci.PATHS["github"]).read_text()
    assert main(["init", "--wheel", "x"]) == 2


def test_it_says_where_it_refuses(repository: Path, capsys):
    assert main(["init", "--ci", "github"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["init", "--ci", "github", "-o", "no.yaml"]) == 2
    (repository / "a b.yaml").write_text("entrypoint: train.py\n")
    assert main(["init", "--ci", "github", "--force", "-o", "a b.yaml"]) == 2
    assert "cannot name a b.yaml" in capsys.readouterr().err


def test_diff_of_plans_is_json_too_and_names_a_file_that_is_no_plan(repository: Path, capsys):
    main(["plan", "-o", "../a.json"])
    main(["plan", "-o", "../b.json"])
    capsys.readouterr()
    assert main(["diff", "../a.json", "../b.json"]) == 0
    assert "nothing differs" in capsys.readouterr().out
    main(["plan", "--set", "env.A=1", "-o", "../b.json"])
    capsys.readouterr()
    assert main(["diff", "../a.json", "../b.json", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["differences"]
    assert {(row["section"], row["path"]) for row in rows} == {("job", "env.A")}, "the request packs the job once more"
    assert main(["diff", "../a.json", "../job.json"]) == 2
