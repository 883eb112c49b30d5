"""What is true of a backend stands with it: no other module knows one by its name."""

from __future__ import annotations

import ast
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend
from cloudtrain.backends.checkpoints import FOLDERS
from cloudtrain.backends.plan import Plan
from cloudtrain.backends.traits import HONOURED, NO_EFFECT, Traits
from cloudtrain.cli.view import ci
from cloudtrain.diagnosis import patterns
from cloudtrain.errors import BadJob
from cloudtrain.forecast import offers, prices
from cloudtrain.job import forms, rules
from cloudtrain.job.document import Document
from cloudtrain.job.job import Job
from cloudtrain.runs.planning import environment
from cloudtrain.runs.planning.attempts import carry_checkpoints
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.testing.memory import MemoryBackend

ROOT = Path(__file__).resolve().parent.parent / "cloudtrain"
REGISTRY = "job/providers.py"
# `ssh` is a program and a protocol too, and `local` an adjective: of them, only what programs compare or write counts.
WORDS = {"local", "ssh"}
NAMES = set(registry.BUILT_IN) - WORDS
# What programs of others print, which verdicts are found by, is data; its words are theirs.
PRINTED = {"diagnosis/classes.toml", "diagnosis/patterns.toml"}
_NAME = re.compile(rf"(?<![\w-])({'|'.join(sorted(NAMES, key=len, reverse=True))})(?![\w-])")


def outside() -> Iterator[tuple[str, str]]:
    """Yield the files that belong to no platform: their names below cloudtrain, and their texts."""
    providers = {path.parent.name for path in (ROOT / "backends").glob("*/backend.py")}
    for path in sorted(ROOT.rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        own = name.startswith("simulators/") or (name.startswith("backends/") and name.split("/")[1] in providers)
        if path.is_file() and path.suffix in (".py", ".pyi", ".toml", ".json", ".yml", ".yaml", ".csv") and not own:
            yield name, path.read_text("utf-8")


def examples(tree: ast.Module) -> Iterator[int]:
    """Yield the lines in the help of a command that show it by a backend's name: a person reads them, no program."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(each) for each in node.decorator_list):
            text = node.body[0]
            if ast.get_docstring(node):
                yield from range(text.lineno, (text.end_lineno or 0) + 1)


def other_meanings(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the literals that name something else: a program, an extra of pip, or a command of another tool."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List) and len(node.elts) > 1 and ast.unparse(node.elts[1]).startswith("'-"):
            yield node.elts[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "MissingExtra":
            yield from node.args
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ELSEWHERE":
            yield from (key for key in getattr(node.value, "keys", ()) if key)
        elif isinstance(node, ast.Expr):
            yield node.value  # a docstring


def named(name: str, text: str) -> set[str]:
    """Return the lines of a file that name a backend, and the literals that are `local`, `ssh` or options of theirs."""
    tree = ast.parse(text if name.endswith(".py") else "")
    shown = set(examples(tree)) if name.startswith("cli/") else set()
    lines = enumerate(text.splitlines(), 1)
    found = {line.strip() for number, line in lines if number not in shown and _NAME.search(line)}
    others = set(map(id, other_meanings(tree)))
    values = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in others}
    words = [value for value in values if isinstance(value, str)]
    return found | {word for each in WORDS for word in words if re.search(rf"^{each}$|\boptions\.{each}\b", word)}


@pytest.mark.parametrize(
    "text",
    [
        'if backend == "slurm": pass',
        '["ssh", "local"]',
        'f"set options.vertex.bucket: {1}"',
        '{"akash": 1}',
        "# for sagemaker-local only",
        '"""Shared by ssh and slurm."""',
        'where = "options.local.root"',
        "from cloudtrain.backends.kubernetes import pod",
        "options: dict = {}; vertex = options",
        '@click.option("-t", help="such as sagemaker")\ndef options(): """A decorator."""',
    ],
)
@pytest.mark.parametrize("name", ["cli/init.py", "runs/run.py"])
def test_a_name_of_a_backend_is_found(name: str, text: str):
    assert named(name, text)


@pytest.mark.parametrize(
    "text",
    [
        'run(["ssh", "-G", host])',
        "parts = local(tensor)  # by ssh",
        '"""Slurm, Kubernetes and SageMaker are names of products."""',
        '@options.command()\ndef command():\n    """Write a job file.\n\n    cloudtrain init -t sagemaker\n    """',
    ],
)
def test_a_program_a_product_and_an_example_of_a_command_are_no_backend(text: str):
    assert not named("cli/init.py", text)


def test_no_file_outside_of_its_package_names_a_backend():
    found = {(name, line) for name, text in outside() if name not in {REGISTRY, *PRINTED} for line in named(name, text)}
    assert found == set()


def test_the_launcher_asks_for_a_platform_by_its_name_in_one_folder_only():
    """There it finds out where it is; elsewhere it asks what the platform does by itself (world/platforms.py)."""
    entrypoints = ROOT.parent / "entrypoints"
    found = {
        name
        for path in sorted(entrypoints.rglob("*.py"))
        if re.search(_NAME, path.read_text("utf-8")) and (name := path.relative_to(entrypoints).as_posix())
    }
    assert {name for name in found if not name.startswith("launcher/world/")} == {"launcher/prepare/sagemaker_env.py"}
    assert "launcher/world/platforms.py" in found


def test_what_may_name_backends_still_does():
    texts = dict(outside())
    assert set(registry.BUILT_IN) <= set(re.findall(r'^    "([a-z-]+)": \("', texts[REGISTRY], re.MULTILINE))
    assert all(_NAME.search(texts[name]) for name in PRINTED)
    assert len(texts) > 300


def test_a_package_that_is_installed_can_read_job_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = types.ModuleType("a_form_of_jobs")
    reader.is_job_file = lambda text: "#QSUB" in text  # type: ignore[attr-defined]
    reader.read = lambda text, file: Document.of({"name": "mine", "run": "true"}, file)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_form_of_jobs", reader)
    package = tmp_path / "site" / "far-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: far\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[cloudtrain.job_files]\nfar = a_form_of_jobs\n")
    monkeypatch.syspath_prepend(package.parent)
    (tmp_path / "job.qsub").write_text("#!/bin/sh\n#QSUB -l nodes=1\ntrue\n")
    assert Job.load(tmp_path / "job.qsub").run == "true"
    (tmp_path / "job.sbatch").write_text("#!/bin/sh\n#SBATCH -N1\ntrue\n")
    assert Job.load(tmp_path / "job.sbatch").compat == "sbatch"
    assert forms.of_compat("skypilot") is None


def test_a_path_is_not_taken_for_one_of_this_machine_on_a_backend_that_does_not_say_so(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    (tmp_path / "train.py").write_text("")
    job = Job(
        name="mine", source=str(tmp_path), entrypoint="train.py", target="memory", audit=True, output="/data/runs"
    )
    Planner().plan(job)
    monkeypatch.delattr(MemoryBackend, "output_is_here")
    with pytest.raises(BadJob, match="is on the machines of memory"):
        Planner().plan(job)


def asked_about(call: ast.Call) -> str:
    """Return the question about a backend's class or attributes that a call is; "" for another one."""
    if not (isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "issubclass", "hasattr", "getattr")):
        return ""
    subject, *more = map(ast.unparse, call.args)
    named = subject.lower().rpartition(".")[2].strip("_()")
    about = named in ("backend", "backend_class", "kind") and "str" not in more
    found = about or any(re.search(r"\b(?!Unknown)\w*Backend\b", each) for each in more)
    return ast.unparse(call) if found else ""


def test_no_module_asks_what_a_backend_is():
    found = {
        (path.relative_to(ROOT).as_posix(), question)
        for path in ROOT.rglob("*.py")
        if path.parent.name != "suite"  # of the contract: what it is given must be a backend
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and (question := asked_about(node))
    }
    assert found == set()


def test_a_key_that_a_backend_does_not_name_is_refused(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    (tmp_path / "train.py").write_text("")
    resources = {"cpus": 4, "memory": "8GB", "disk_gb": 10, "accelerators": "A100:1"}
    job = Job(name="mine", source=str(tmp_path), entrypoint="train.py", target="memory", resources=resources)
    Planner().plan(job)
    taken = {"resources.accelerators": HONOURED, "resources.disk_gb": NO_EFFECT}
    monkeypatch.setattr(MemoryBackend, "traits", Traits(keys=taken))
    with pytest.raises(BadJob) as error:
        Planner().plan(job)
    assert [problem.path for problem in error.value.problems] == ["resources.cpus", "resources.memory"]


def test_the_launcher_has_the_roles_and_one_node_has_not_enough_for_them(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    (tmp_path / "train.py").write_text("")
    roles = {"trainer": {"entrypoint": "train.py"}, "server": {"run": "serve"}}
    job = Job.from_dict({"name": "mine", "source": str(tmp_path), "target": "memory", "roles": roles})
    monkeypatch.setattr(MemoryBackend, "traits", Traits(keys={"num_nodes": HONOURED}))
    assert Planner().plan(job).node_roles == ["trainer", "server"]
    monkeypatch.setattr(MemoryBackend, "traits", Traits())
    with pytest.raises(BadJob) as error:
        Planner().plan(job)
    assert [problem.path for problem in error.value.problems] == ["num_nodes"]


ROLE = "arn:aws:iam::123456789012:role/train"
OPTIONS: dict[str, dict[str, Any]] = {
    "akash": {"store": "s3://bucket/akash", "image": "registry/any:1", "max_usd_per_hour": 1.0},
    "azureml": {
        "subscription": "00000000-1111-2222-3333-444444444444",
        "resource_group": "group",
        "workspace": "space",
        "store": "az://jobs@account",
        "image": "registry/any:1",
    },
    "kubernetes": {"image": "registry/any:1", "spot_selector": {"spot": "true"}, "kind": "jobset"},
    "sagemaker": {"role": ROLE, "bucket": "bucket", "region": "us-east-1", "image": "registry/any:1"},
    "slurm": {"folder": "/shared", "spot_partition": "spot"},
    "vertex": {"project": "project", "bucket": "bucket", "image": "registry/any:1"},
    "vertex-local": {},
}
ROLES: dict[str, Any] = {"roles": {"trainer": {}, "server": {"run": "serve"}}}
# key -> a job that uses it, and what it has in common with one that does not
USES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "num_nodes": ({"num_nodes": 3}, {}),
    "min_nodes": ({"min_nodes": 2}, {"num_nodes": 3}),
    "image": ({"image": "registry/other:2"}, {}),
    "resources.accelerators": ({"resources": {"accelerators": "A100:8"}}, {}),
    "resources.use_spot": ({"resources": {"use_spot": True}}, {}),
    "resources.disk_gb": ({"resources": {"disk_gb": 321}}, {}),
    "resources.cpus": ({"resources": {"cpus": 33}}, {}),
    "resources.memory": ({"resources": {"memory": "111GB"}}, {}),
    "roles.resources": ({"roles": {"trainer": {}, "server": {"run": "serve", "resources": {"cpus": 33}}}}, ROLES),
    "roles.image": ({"roles": {"trainer": {}, "server": {"run": "serve", "image": "registry/other:2"}}}, ROLES),
    "roles.colocate": ({"roles": {"trainer": {}, "server": {"run": "serve", "colocate": "trainer"}}}, ROLES),
    "secrets.k8s": ({"secrets": {"TOKEN": "k8s:name/key"}}, {}),
    "limits.max_runtime": ({"limits": {"max_runtime": "7h"}}, {}),
    "limits.max_wait": ({"limits": {"max_wait": "3h"}}, {}),
    "retry.by": (
        {"retry": {"max_attempts": 4, "by": "cluster"}},
        {"num_nodes": 3, "options": {"kubernetes": {"kind": "jobset"}}},
    ),
    "retry.max_attempts": ({"retry": {"max_attempts": 4, "on_events": ["lost", "preempted"]}}, {}),
}
TYPES = {
    "sagemaker": "ml.g5.48xlarge",
    "kubernetes": "any",
    "azureml": "Standard_E8s_v3",
    "vertex": "n2-standard-32",
    "vertex-local": "n2-standard-32",
}
WAITING: dict[str, dict[str, Any]] = {"sagemaker": {"resources": {"use_spot": True}},
                                      "vertex": {"options": {"vertex": {"strategy": "FLEX_START"}}}}  # fmt: skip
MAPPED = [
    (name, key, field)
    for name in registry.BUILT_IN
    for key, becomes in registry.backend_class(name).traits.keys.items()
    for field in [becomes]
    if field not in (HONOURED, NO_EFFECT)
]


def values(request: Any, field: str) -> Iterator[str]:
    """Yield what a request has in its fields of a name, or in options such as --nodes."""
    if isinstance(request, dict):
        for name, value in request.items():
            yield from [json.dumps(value)] if name == field else values(value, field)
    elif isinstance(request, list):
        for value in request:
            yield from values(value, field)
    elif isinstance(request, str) and field.startswith("--") and request.partition("=")[0] in field.split(", "):
        yield request


@pytest.mark.parametrize(("name", "key", "field"), MAPPED)
def test_a_key_changes_the_field_that_traits_name(tmp_path: Path, home: Path, name: str, key: str, field: str):
    (tmp_path / "train.py").write_text("")
    use, common = USES[key] if key in USES else ({"resources": {"instance_type": TYPES[name]}}, {})
    if key == "limits.max_wait":
        common = WAITING.get(name, {})
    keys = {"name": "mine", "source": str(tmp_path), "entrypoint": "train.py", "target": name, **common}

    def planned(**more: Any) -> list[str]:
        plan = Planner(name, **OPTIONS.get(name, {})).plan(Job.from_dict(keys | more))
        return list(values(json.loads(json.dumps(plan.request)), field))

    assert planned() != planned(**use)


PRICED = ("azureml", "sagemaker", "vertex")


@pytest.mark.parametrize("name", PRICED)
def test_the_machine_of_a_plan_is_named_as_in_the_list_of_prices(tmp_path: Path, home: Path, name: str):
    (tmp_path / "train.py").write_text("")
    kind = registry.backend_class(name)
    listed, options = f"{name}/{kind.traits.prices}", {**OPTIONS[name], "region": kind.traits.prices}
    machine = min(prices.machines_of(listed))
    job = Job(name="mine", source=str(tmp_path), entrypoint="train.py", resources={"instance_type": machine})
    assert kind(options, tmp_path).machine(Planner(name, **options).plan(job)) == f"{listed}/{machine}"


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_which_backends_have_prices_and_start_programs_beside_a_rank(name: str):
    kind = registry.backend_class(name)
    assert bool(kind.traits.prices) == (name in PRICED) and kind.traits.shell == (kind.shell is not Backend.shell)


def test_the_traits_name_keys_of_the_job_file():
    known = {*rules.platform_keys(), *rules.SHARED_KEYS}
    for name in registry.BUILT_IN:
        keys = registry.backend_class(name).traits.keys
        assert keys.keys() <= known and set(map(type, keys.values())) <= {str}, name


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_what_to_do_about_a_failure_can_be_done_on_the_backend(name: str):
    """A fix that raises a key which the backend refuses, or which has no effect there, helps nobody."""
    traits = registry.backend_class(name).traits
    classes = patterns.classes()
    assert traits.fixes.keys() <= classes.keys()
    for label, known in classes.items():
        fix = traits.fixes.get(label, known.fix)
        for key in re.findall(r"\bresources\.\w+", fix):
            assert traits.keys.get(key, NO_EFFECT) != NO_EFFECT, (label, fix)


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_a_backend_is_looked_at_again_and_again_and_not_all_the_time(name: str):
    assert 0.05 <= registry.backend_class(name).poll_s <= 60


def test_a_package_whose_backend_does_not_load_stops_nobody_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_plugins", lambda: {"attic": "a_package_that_is_gone.backend:Attic"})
    environment.credentials.cache_clear()
    assert environment.credentials() == environment.CREDENTIALS
    assert registry.priced_by("nobody") is None and registry.priced_by("") is None
    assert registry.priced_by("gcp") is not None
    environment.credentials.cache_clear()


@pytest.mark.parametrize("account", [12345678901, "012345678901"])
def test_an_account_that_is_a_number_guards_a_ci_file_too(account: object):
    assert registry.backend_class("sagemaker").ci_values({"account": account})["account"] == "012345678901"


@pytest.mark.parametrize(("name", "variable"), [("sagemaker", "SM_MODEL_DIR"), ("vertex", "AIP_MODEL_DIR")])
def test_variables_that_a_platform_sets_are_set_elsewhere_only(tmp_path: Path, home: Path, name: str, variable: str):
    (tmp_path / "train.py").write_text(f"import os\nprint(os.environ['{variable}'])\n")

    def notes(target: str) -> str:
        job = Job(name="mine", source=str(tmp_path), entrypoint="train.py")
        return "\n".join(Planner(target, **OPTIONS.get(target, {})).plan(job).notes)

    assert f"train.py:2 reads {variable}" in notes("local") and variable not in notes(name)


@pytest.mark.parametrize(
    ("old", "new", "folder"), [("sagemaker", "slurm", FOLDERS[1]), ("sagemaker", "sagemaker", None)]
)
def test_an_attempt_elsewhere_finds_checkpoints_as_the_platform_before_it_names_them(
    old: str, new: str, folder: str | None
):
    before = Plan(old, "r", 1, {}, {}, {"checkpoint": {}}, {})
    assert carry_checkpoints({"required": False}, new, before, saved=True)["folder"] == folder


CLIENTS = {
    "akash": "boto3",
    "azureml": "azure-identity>=1.25",
    "sagemaker": "boto3",
    "slurm": "asyncssh",
    "ssh": "asyncssh",
}


@pytest.mark.parametrize(("name", "client"), CLIENTS.items())
def test_a_ci_file_installs_what_a_submission_needs(name: str, client: str):
    assert f" {client}\n" in ci.Place(name, wheel="cloudtrain==1").build("github", "job.yaml").replace('"', "")


def test_a_ci_file_logs_in_to_a_cluster():
    made = ci.Place("kubernetes", {"server": "https://1.2.3.4", "context": "prod"}).build("github", "job.yaml")
    assert "https://1.2.3.4" in made and "id-token: write" in made
    assert "id-token: write" in ci.Place("azureml").build("github", "job.yaml")


def test_machines_of_the_provider_that_a_platform_rents_from_have_the_facts_of_its_table():
    own, rented = (offers.machines_of(provider) for provider in ("sagemaker", "aws"))
    assert own["ml.g5.12xlarge"] == rented["g5.12xlarge"] and "ml.g5.12xlarge" not in rented
    assert offers.machines_of("azureml")["Standard_NC48ads_A100_v4"].accelerators == 2


def test_the_calls_for_a_job_on_this_machine_read_no_credentials():
    shell = {"AWS_PROFILE": "one", "KUBECONFIG": "/k", "HOME": "/home/me"}
    assert environment.select(shell, environment.patterns_of("local")) == {}
