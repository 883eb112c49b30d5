"""`cloudtrain permissions`: the roles hold what the simulators saw called, and no more."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from cloudtrain.backends import shell
from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.backends.kubernetes.permissions import build_role
from cloudtrain.backends.vertex.permissions import build_permissions
from cloudtrain.cli import main
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.source.bundle import Bundle
from tests.backends.kubernetes.clusters import ground
from tests.backends.vertex.bench import Bench, ended
from tests.conftest import wait_for
from tests.policy.test_page import FILES

DOCS = Path(__file__).parents[2] / "docs"
OBJECT = re.compile(
    r"/(?:api|apis/([^/]+))/v[^/]+/namespaces/[^/]+/([a-z]+)(?:/([^/?:]+)(?::\d+)?)?(?:/(log|proxy|status|exec|portforward))?"
)
VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
Grant = tuple[str, str, str]


def granted(options: dict, *, inside: bool = False) -> set[Grant]:
    return {
        (verb, group, resource)
        for rule in build_role(options, inside=inside)[0]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def asked(requests: list[tuple[str, str]]) -> set[Grant]:
    """Return verb, group and resource of what a cluster was asked, as its RBAC sees it."""
    found = set()
    for method, path in requests:
        if match := OBJECT.match(path):
            group, plural, name, part = match.groups()
            verb = VERBS.get(method) or ("get" if name else "list")
            found.add(
                (verb, group or "", plural + (f"/{part}" if part in ("log", "proxy", "exec", "portforward") else ""))
            )
    return found


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_the_role_is_what_a_cluster_is_asked(kind: str, tmp_path: Path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("import sys, time\nprint('here', flush=True)\ntime.sleep(float(sys.argv[1]))\n")
    with ground(tmp_path / "ground") as made:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.store.url)
        made.cluster.kubelet.operators = {"jobset.x-k8s.io"} if kind == "jobset" else set()
        options = {"kind": kind, "network_policy": True}
        backend = made.backend(**options)
        bundle = Bundle.make(source, tmp_path / "bundles")

        def submit(name: str, seconds: str, **more) -> str:
            keys = {"name": name, "source": str(source), "entrypoint": "train.py", "args": [seconds], **more}
            job = Job.from_dict({**keys, "output": "gs://local/out", "environment": {"requirements": "none"}})
            return backend.submit(backend.plan(job, bundle, name), bundle)

        before = len(made.cluster.server.requests)
        first = submit("one", "0")
        assert backend.find("one-a1") == first
        wait_for(lambda: backend.status(first).state is State.SUCCEEDED, "the end")
        assert [line.text for line in backend.logs(first) if "here" in line.text]
        backend.statuses([first])
        second = submit("two", "600", num_nodes=2)
        wait_for(lambda: backend.status(second).state is State.RUNNING, "the start")
        backend.cancel(second)
        wait_for(lambda: backend.status(second).state.final, "the end")
        backend.fetch(first, tmp_path / "out")
        backend.remove(first)
        used = asked(made.cluster.server.requests[before:])
    role = granted(options)
    assert used <= role, used - role
    # Asked only now and then: an object that is there already, a cancelled Job of a queue, why a pod waits.
    rare = {("get", "", "configmaps"), ("get", "", "services"), ("get", "networking.k8s.io", "networkpolicies")}
    rare |= {("list", "", "events"), ("delete", "batch", "jobs"), ("delete", "jobset.x-k8s.io", "jobsets")}
    rare |= {("list", "batch", "jobs"), ("list", "jobset.x-k8s.io", "jobsets")}
    assert role <= used | rare, role - used


def test_options_add_to_the_role():
    for options, wanted in (
        ({"kind": "jobset"}, ("create", "jobset.x-k8s.io", "jobsets")),
        ({"volumes": [1]}, ("get", "", "pods/proxy")),
        ({"network_policy": True}, ("create", "networking.k8s.io", "networkpolicies")),
        ({"queue": "q"}, ("list", "kueue.x-k8s.io", "workloads")),
    ):
        assert wanted in granted(options) and wanted not in granted({})
    plain = granted({})
    assert not {grant for grant in plain if grant[2] in ("pods/proxy", "networkpolicies", "workloads", "jobsets")}
    assert ("create", "", "pods") not in plain, "who may make pods passes an admission policy for Jobs by"


def test_only_with_inside_the_role_opens_pods(tmp_path: Path, acme: Path, capsys):
    """What the backend asks for exec and forward is in it, with the verb that Kubernetes 1.35 adds, and nothing else is."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    with ground(tmp_path / "ground") as made:
        backend = made.backend()
        bundle = Bundle.make(source, tmp_path / "bundles")
        keys = {"name": "one", "source": str(source), "entrypoint": "train.py", "environment": {"requirements": "none"}}
        handle = backend.submit(backend.plan(Job.from_dict(keys), bundle, "one"), bundle)
        wait_for(lambda: any("here" in line.text for line in backend.logs(handle)), "the rank")
        before = len(made.cluster.server.requests)
        words = shell.program("exec", "one-a1", 0, "-", "-", "true")
        assert shell.call(backend.shell(handle, 0, words, stdin=False, terminal=False)).code == 0
        assert shell.call(backend.connect(handle, 0, 1)).code == 1
        used = asked(made.cluster.server.requests[before:])
        backend.cancel(handle)
        wait_for(lambda: backend.status(handle).state.final, "the end")
    added = granted({}, inside=True) - granted({})
    opening = {grant for grant in used if grant[2].startswith("pods/")}
    assert used <= granted({}, inside=True) and opening == {("get", "", "pods/exec"), ("get", "", "pods/portforward")}
    assert added == opening | {("create", group, resource) for _, group, resource in opening}
    (acme / "cloudtrain.toml").write_text('[targets.cluster]\nbackend = "kubernetes"\nnamespace = "ml"\nimage = "i"\n')
    assert main(["permissions", "-t", "cluster"]) == 0 and "pods/exec" not in capsys.readouterr().out
    assert main(["permissions", "-t", "cluster", "--inside"]) == 0
    printed = capsys.readouterr()
    assert "pods/portforward" in printed.out and not printed.err


def test_where_options_open_shells_inside_adds_nothing_and_says_so(acme: Path, capsys):
    assert main(["permissions", "-t", "prod"]) == 0
    before = capsys.readouterr()
    assert main(["permissions", "-t", "prod", "--inside"]) == 0
    after = capsys.readouterr()
    assert before.out == after.out and "--inside adds nothing on sagemaker" in after.err


VERTEX = {  # a call of the service -> the permission that it needs
    r"POST /v1/.*/customJobs$": "aiplatform.customJobs.create",
    r"POST /v1/.*/customJobs/\d+:cancel": "aiplatform.customJobs.cancel",
    r"GET /v1/.*/customJobs\?": "aiplatform.customJobs.list",
    r"GET /v1/.*/customJobs/\d+$": "aiplatform.customJobs.get",
    r"DELETE /v1/.*/customJobs/\d+$": "aiplatform.customJobs.delete",
    r"POST /v2/entries:list": "logging.logEntries.list",
}


@pytest.fixture
def bench(tmp_path: Path):
    made = Bench(tmp_path)
    yield made
    made.simulator.close()


def test_the_custom_role_is_what_vertex_ai_is_asked(bench: Bench, tmp_path: Path):
    backend = bench.backend()
    first, bundle = bench.plan("print('here')")
    handle = backend.submit(first, bundle)
    assert backend.find(first.attempt_id) == handle
    ended(backend, handle)
    assert [line for line in backend.logs(handle) if "here" in line.text]
    second, bundle = bench.plan("import time; time.sleep(600)")
    other = backend.submit(second, bundle)
    backend.cancel(other)
    ended(backend, other)
    backend.remove(handle)
    requests = [f"{method} {path}" for method, path in bench.simulator.server.requests]
    calls = [call for call in requests if "/customJobs" in call or "entries" in call]
    needed = [next((name for pattern, name in VERTEX.items() if re.match(pattern, call)), call) for call in calls]
    assert set(needed) == set(build_permissions({"project": "p", "bucket": "b"})["role"]["includedPermissions"])


def write_vertex_target() -> None:
    """Write a script and the target `g` into the current folder."""
    Path("train.py").write_text("print(1)\n")
    Path("cloudtrain.toml").write_text(
        '[targets.g]\nbackend = "vertex"\nproject = "p"\nregion = "us-central1"\nbucket = "bbb"\nimage = "i:1"\n'
        'service_account = "train@p.iam.gserviceaccount.com"\n'
    )


def test_the_account_of_a_job_on_vertex_ai_may_read_its_secrets(tmp_path: Path, home: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_vertex_target()
    secrets = '{A: "gcp-secretmanager:hub", B: "gcp-secretmanager:projects/q/secrets/x/versions/3"}'
    Path("job.yaml").write_text(f"entrypoint: train.py\ntarget: g\nsecrets: {secrets}\n")
    assert main(["permissions", "-t", "g", "--json"]) == 0
    assert "secretAccessor" not in capsys.readouterr().out
    assert main(["permissions", "-t", "g", "--job", "job.yaml", "--json"]) == 0
    bindings = json.loads(capsys.readouterr().out)["documents"]["bindings.json"]
    own = ["serviceAccount:train@p.iam.gserviceaccount.com"]
    assert [(each["resource"], each["members"]) for each in bindings if "secretAccessor" in each["role"]] == [
        ("projects/p/secrets/hub", own),
        ("projects/q/secrets/x", own),
    ]
    page = (DOCS / "vertex.md").read_text()
    assert {each["role"] for each in bindings if each["role"].startswith("roles/")} <= set(
        re.findall(r"roles/[\w.]+", page)
    )


@pytest.mark.parametrize(
    ("audit", "team"),
    [("false", "roles/storage.objectViewer"), ("true", "roles/storage.objectUser")],
    ids=["", "its audit is written by who submits"],
)
def test_a_job_on_vertex_ai_reads_its_inputs_and_writes_its_output(
    tmp_path: Path, home: Path, monkeypatch, capsys, audit: str, team: str
):
    monkeypatch.chdir(tmp_path)
    write_vertex_target()
    inputs = "{texts: gs://acme-data/texts, more: gs://acme-data/more, mine: gs://bbb/x, old: gs://acme-out/y}"
    Path("job.yaml").write_text(
        f"entrypoint: train.py\ntarget: g\naudit: {audit}\noutput: gs://acme-out/runs\ninputs: {inputs}\n"
    )
    assert main(["permissions", "-t", "g", "--job", "job.yaml", "--json"]) == 0
    bindings = json.loads(capsys.readouterr().out)["documents"]["bindings.json"]
    own, group = "serviceAccount:train@p.iam.gserviceaccount.com", "group:TEAM@EXAMPLE.COM"
    found = {
        (each["resource"], each["role"], member)
        for each in bindings
        for member in each["members"]
        if "storage" in each["role"]
    }
    assert found == {
        ("gs://bbb", "roles/storage.objectUser", own),
        ("gs://bbb", "roles/storage.objectUser", group),
        ("gs://acme-out", "roles/storage.objectUser", own),
        ("gs://acme-out", team, group),
        ("gs://acme-data", "roles/storage.objectViewer", own),
    }


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "acme"
    for name, text in {**FILES, "train.py": "print(1)\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KUBECONFIG", str(folder / "none"))
    return folder


def test_documents_are_written_and_printed(acme: Path, capsys):
    assert main(["permissions", "-t", "prod", "--policy", "-o", "out"]) == 0
    printed = capsys.readouterr()
    assert printed.out.split() == [f"out/{name}.json" for name in ("trust", "role", "submit", "rules")]
    assert "IAM cannot enforce output (rule aws of the policy)" in printed.err
    assert "the role may not write to the output that the rules require: --job FILE adds" in printed.err
    assert all(json.loads(path.read_text())["Version"] == "2012-10-17" for path in Path("out").glob("*.json"))
    assert main(["permissions", "-t", "prod", "--job", "job.yaml", "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    documents = given["documents"]
    assert not [note for note in given["notes"] if "--job FILE" in note]
    assert "arn:aws:s3:::acme-runs/nlp/*" in json.dumps(documents["role.json"])


def test_kubernetes_prints_what_kubectl_reads(acme: Path, capsys):
    (acme / "cloudtrain.toml").write_text('[targets.cluster]\nbackend = "kubernetes"\nnamespace = "ml"\nimage = "i"\n')
    assert main(["permissions", "-t", "cluster", "--policy"]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [each["kind"] for each in objects] == [
        "Role", "RoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
    ]  # fmt: skip
    assert main(["doctor", "cluster", "--policy", "role"]) == 2
    assert "cloudtrain permissions -t TARGET prints" in capsys.readouterr().err
    import kubernetes_validate

    for each in objects:
        kubernetes_validate.validate(each, "1.37", strict=True)


def test_a_target_without_permissions_says_so(acme: Path, capsys):
    assert main(["permissions", "-t", "local"]) == 2
    assert "needs no permissions of a platform" in capsys.readouterr().err
    (acme / "policy.toml").unlink()
    assert main(["permissions", "-t", "prod", "--policy"]) == 2
    assert "no policy.toml applies on this machine" in capsys.readouterr().err


def test_the_page_of_kubernetes_names_these_permissions():
    """The page's Role has everything that any options add."""
    text = (DOCS / "kubernetes.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    page = {
        (verb, group, resource)
        for rule in yaml.safe_load(text)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    options = {"volumes": [1], "queue": "q", "network_policy": True}
    assert granted(options, inside=True) | granted({**options, "kind": "jobset"}) <= page | {
        ("get", "networking.k8s.io", "networkpolicies")
    }


def test_permissions_of_a_plan_are_pure(acme: Path):
    plan = Planner("prod").plan("job.yaml")
    assert plan.policies and KubernetesBackend({"namespace": "x"}, acme).permissions(None)["role.yaml"]
