"""The form's model: job file -> form -> job file loses nothing, and an edit changes what it says it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudtrain.console import fields, jobtext, trainer
from cloudtrain.console.fields import Field, Step
from cloudtrain.console.form import Form, GitSource, lean
from cloudtrain.errors import BadJob, Problem
from cloudtrain.job.document import Document, read_yaml
from cloudtrain.job.job import Job, schema
from cloudtrain.runs.planning.checks import job as job_checks
from cloudtrain.source import clone

FIELDS = {field.name: field for field in fields.job_fields()}
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10) | st.sampled_from(
    ["no", "1e-4", "0123", "", "a: b", "{x", "[", '"', "'", "\n", "--x", "<b>", "$HOME", "\u2028", "# c", "*a", "a\nb"]
)
words = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
numbers = st.sampled_from(["1e-4", "3.0e-4", "0123", "1.10", "-5", "0x1F", "2"])
variables = st.from_regex(r"[A-Z]{3,8}", fullmatch=True).filter(lambda name: name not in ("RANK",))
counts = st.integers(1, 4)
jobs = st.fixed_dictionaries(
    {"name": st.from_regex(r"[a-z][a-z0-9]{0,9}", fullmatch=True), "num_nodes": counts},
    optional={
        "source": st.sampled_from([".", "src", "/data/code", "git+https://host/a/repo@main#subdirectory=x"]),
        "entrypoint": st.sampled_from(["train.py", "-m pkg.train", "a b.py"]),
        "args": st.lists(texts, max_size=4),
        "env": st.dictionaries(variables, texts, max_size=3),
        "labels": st.dictionaries(texts, texts, max_size=3),
        "secrets": st.dictionaries(variables, st.sampled_from(["env:A", ["file:/a b", "env:A"]]), max_size=2),
        "metrics": st.dictionaries(texts, st.sampled_from(["loss=([0-9.e+-]+)", r"a\s(.)"]), max_size=2),
        "processes_per_node": counts,
        "resources": st.fixed_dictionaries({}, optional={"use_spot": st.booleans(), "disk_gb": counts}),
        "limits": st.fixed_dictionaries({}, optional={"max_runtime": st.sampled_from(["24h", "15m"])}),
        "checkpoint": st.fixed_dictionaries({}, optional={"every": st.sampled_from(["500 steps", "5m"])}),
        "retry": st.fixed_dictionaries({}, optional={"max_attempts": counts, "on_events": st.just(["lost"])}),
        "environment": st.just({"requirements": "none"}),
        "inputs": st.dictionaries(
            words, st.sampled_from(["/data/x", "s3://b/x/", {"uri": "data", "mode": "stream"}]), max_size=2
        ).filter(lambda found: len({name.upper() for name in found}) == len(found)),
        "allow_secrets": st.lists(st.sampled_from(["*.pem", "tests/keys/", "[ab].txt", "!x"]), max_size=3),
        "options": st.dictionaries(words, st.dictionaries(words, texts | st.integers() | st.booleans()), max_size=2),
    },
).filter(lambda job: job.get("env", {}).keys().isdisjoint(job.get("secrets", {})))  # one name in both is refused
hyperparameters = st.dictionaries(
    words, texts | st.booleans() | st.none() | st.lists(st.integers(0, 9), max_size=3) | st.floats(allow_nan=False)
)


def job_of(form: Form) -> Job:
    document, folder = form.document()
    assert document.problems == []
    return Job.from_document(document, folder)


def same(one: Job, other: Job) -> bool:
    """Return whether two jobs are equal and put their arguments in the same order."""
    return one == other and one.argv() == other.argv() and list(one.env) == list(other.env)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs, hyperparameters, st.dictionaries(words, numbers, max_size=3))
def test_a_job_becomes_a_form_and_the_same_job_again(data, given_values, written):
    """Also when every field is shown and put back, and when what is default is left out."""
    folder = Path("/project")
    whole = {"trainer": True, **data, "hyperparameters": given_values | written}
    whole["trainer"] = "entrypoint" not in whole
    job = Job.from_document(Document.of(whole, "Job"), folder)
    form = Form.of_job(job.to_dict(given=True), folder)
    assert same(job_of(form), job)
    before = form.text()
    for field in fields.job_fields():
        form.set_field(field, form.field_text(field))
        if field.kind == "rows":
            form.set_rows(field.path, form.rows(field.path))
    assert form.text() == before
    for value in {*written.values()}:
        assert value in before
    assert same(job_of(Form.of_job(lean(job.to_dict()), folder)), job)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(FIELDS)), texts.filter(bool))
def test_whatever_is_typed_arrives_or_is_a_problem(name, typed):
    """A hostile text in any field never makes a file that cannot be read, nor one that says something else elsewhere."""
    field, form = FIELDS[name], Form.blank(Path("/project"))
    form.set_field(FIELDS["name"], "before")
    form.set_field(field, typed)
    if form.problems:
        with pytest.raises(BadJob) as caught:
            form.document()
        assert {problem.path for problem in caught.value.problems} == {name}
        return
    read = form.document()[0].value
    if field.path != ("name",):
        assert read.pop("name") == "before"
    if field.kind in ("text", "choice"):
        section = read
        for key in field.path[:-1]:
            section = section[key]
        assert section == {field.path[-1]: typed}
    assert list(read) == [field.path[0]]


FILE = """\
# yaml-language-server: $schema=job.schema.json
# for the paper
name: tiny
# where it runs
target: prod          # the cluster
hyperparameters:
  lr: 1e-4
  layers: [2, 4]
  optim: {name: adamw, eps: 1.0e-08}
# one for each
num_nodes: 2
resources: {accelerators: "A100:8"}
"""


def test_a_file_keeps_its_comments_and_its_numbers(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(FILE)
    form = Form.load(path)
    assert form.text() == FILE
    form.set_field(FIELDS["num_nodes"], "4")
    form.set_field(FIELDS["source"], "src")
    form.set_rows(("hyperparameters",), [*form.rows(("hyperparameters",)), ("dropout", "0.10")])
    assert form.text() == FILE.replace("num_nodes: 2", "num_nodes: 4").replace(
        "name: tiny\n", "name: tiny\nsource: src\n"
    ).replace("1.0e-08}\n", "1.0e-08}\n  dropout: 0.10\n")
    form.set_field(FIELDS["target"], "")
    assert "# the cluster" not in form.text() and "# one for each\nnum_nodes: 4" in form.text()


def test_a_file_with_anchors_changes_one_value(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("env: &same {A: x}\nlabels: *same\n")
    form = Form.load(path)
    form.set_rows(("labels",), [("A", "y")])
    read = form.document()[0].value
    assert read == {"env": {"A": "x"}, "labels": {"A": "y"}}


def test_a_field_that_is_emptied_is_left_out_with_its_section():
    form = Form.blank(Path("/p"))
    form.set_field(FIELDS["limits.max_runtime"], "2h")
    assert form.text() == "limits:\n  max_runtime: 2h\n"
    form.set_field(FIELDS["limits.max_runtime"], "")
    assert form.text() == "{}\n"


def test_new_keys_stand_in_the_order_of_the_reference():
    form = Form.blank(Path("/p"))
    for name, text in (("target", "local"), ("num_nodes", "2"), ("source", "."), ("name", "x")):
        form.set_field(FIELDS[name], text)
    assert form.text() == "name: x\nsource: .\nnum_nodes: 2\ntarget: local\n"


def test_arguments_are_read_as_a_shell_reads_them():
    form, args = Form.blank(Path("/p")), FIELDS["args"]
    form.set_field(args, "--tag 'a b' \"$x\" 1e-4")
    form.set_field(FIELDS["entrypoint"], "t.py")
    assert job_of(form).args == ["--tag", "a b", "$x", "1e-4"]
    form.set_field(args, "--tag 'a b")
    (problem,) = form.problems[("args",)]
    assert problem.path == "args" and "no closing quotation" in problem.message
    form.set_field(args, "--tag")
    assert not form.problems and job_of(form).args == ["--tag"]


def test_rows_with_an_own_field_keep_their_place():
    form = Form.of_job({"hyperparameters": {"lr": "1e-4", "mine": "x", "max_steps": "5", "last": "y"}}, Path("/p"))
    form.set_rows(("hyperparameters",), [("mine", "z"), ("more", "1")], without={"lr", "max_steps"})
    assert form.text() == "hyperparameters:\n  lr: 1e-4\n  mine: z\n  max_steps: 5\n  more: 1\n"


def test_a_name_that_is_given_twice_is_a_problem_of_the_file():
    form = Form.blank(Path("/p"))
    form.set_rows(("env",), [("A", "1"), ("A", "2"), ("", "")])
    document, _ = form.document()
    assert "given twice" in document.problems[0].message


def test_a_short_parallelism_is_the_strategys_field(tmp_path: Path):
    (tmp_path / "job.yaml").write_text("trainer: true\nparallelism: auto\n")
    form = Form.load(tmp_path / "job.yaml")
    assert form.field_text(FIELDS["parallelism.strategy"]) == "auto"
    assert Job.from_document(*form.document()).parallelism.strategy == "auto"


def test_a_form_that_moves_takes_its_relative_paths_along(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: x\ntrainer: true\ninputs: {a: data/, b: {uri: more}, c: s3://b/x, d: /abs}\noutput: out\nenv: {P: keep/me}\n"
    )
    form, away = Form.load(path), tmp_path / "jobs" / "deep"
    moved = form.moved_to(away)
    assert same(job_of(moved), job_of(form))
    assert moved.text() != form.text() and "P: keep/me" in moved.text()
    assert form.moved_to(tmp_path).text() == form.text()


def test_every_key_of_the_job_file_has_one_field():
    keys = [name for name, _ in fields._keys(schema())]
    assert sorted(keys) == sorted(FIELDS)
    assert len(FIELDS) == len(fields.job_fields())
    assert {field.step for field in FIELDS.values()} == set(Step) - {Step.REVIEW}
    assert all(field.help for field in FIELDS.values())


def test_a_new_key_is_in_the_form_without_a_line_of_the_layout(monkeypatch):
    layout = {
        step: {group: keys.replace(" limits.idle", "").replace(" compat", "") for group, keys in groups.items()}
        for step, groups in fields._LAYOUT.items()
    }
    monkeypatch.setattr(fields, "_LAYOUT", layout)
    unnamed = {field.name: field for field in fields.job_fields.__wrapped__()}
    assert unnamed.keys() == FIELDS.keys()
    places = {name: (unnamed[name].step, unnamed[name].group, unnamed[name].main) for name in ("limits.idle", "compat")}
    assert places == {"limits.idle": (Step.INFRASTRUCTURE, "Limits", False), "compat": (Step.GENERAL, "Job", False)}


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("num_nodes", (Step.INFRASTRUCTURE, "num_nodes")),
        ("resources.accelerators", (Step.INFRASTRUCTURE, "resources.accelerators")),
        ("hyperparameters.optim.lr", (Step.GENERAL, "hyperparameters")),
        ("args[2]", (Step.GENERAL, "args")),
        ("env.A", (Step.INFRASTRUCTURE, "env")),
        ("inputs.train.mode", (Step.SOURCE, "inputs")),
        ("options.ssh.hosts[0].address", (Step.INFRASTRUCTURE, "options.ssh.hosts")),
        ("limits.nonsense", (Step.INFRASTRUCTURE, "limits.max_runtime")),
        ("num_node", (Step.REVIEW, "")),
        ("", (Step.REVIEW, "")),
    ],
)
def test_a_problem_stands_at_its_field(path, place):
    assert fields.locate(path) == place


def test_the_options_of_every_backend_have_fields():
    from cloudtrain.backends import registry

    for backend in registry.names():
        found = fields.option_fields(backend)
        model = registry.backend_class(backend).options()
        assert [field.path for field in found] == [("options", backend, name) for name in model.model_fields]
    assert [field.name for field in fields.option_fields("slurm") if field.main] == ["options.slurm.folder"]


def test_the_trainers_arguments_are_its_own():
    known = trainer.arguments()
    assert known["learning_rate"].default == "5e-05" and known["learning_rate"].kind == "number"
    assert known["eval_strategy"].choices == ("no", "steps", "epoch")
    assert known["task"].choices == (), "a class of the source is one too"
    assert set(trainer.MAIN_ARGUMENTS) < set(known)
    fine, wrong = (
        {"dataset": "python-stdlib", "learning_rate": "1e-4", "max_steps": 3},
        {"learning_rat": 1, "max_steps": "many"},
    )
    jobs = [Job(name="x", trainer=True, hyperparameters=values) for values in (fine, wrong)]
    nothing, found = (job_checks.find_refusals(job, {}, 1, 1) for job in jobs)
    assert nothing == []
    assert {problem.path for problem in found} == {"hyperparameters.learning_rat", "hyperparameters.max_steps"}
    assert any("did you mean --learning_rate?" in problem.message for problem in found)


def test_a_tagged_number_stays_what_it_is():
    document = read_yaml("options: {x: {settle_s: !!float 5}}")
    field = Field(("options", "x", "settle_s"), Step.INFRASTRUCTURE, "Options", "number", "")
    form = Form(jobtext.from_document(document), Path("/p"))
    form.set_field(field, form.field_text(field))
    assert type(form.document()[0].value["options"]["x"]["settle_s"]) is float


def test_problems_are_sorted_by_step():
    found = fields.by_step([Problem("a", "name"), Problem("b", "target"), Problem("c", "strange")])
    assert {step: len(items) for step, items in found.items()} == {
        Step.GENERAL: 1,
        Step.INFRASTRUCTURE: 1,
        Step.REVIEW: 1,
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("git+https://host/a/repo", ("https://host/a/repo", "", "")),
        ("git+https://host/a/repo@v1.2", ("https://host/a/repo", "v1.2", "")),
        ("git+ssh://git@host/a/repo@feature/x#subdirectory=src", ("ssh://git@host/a/repo", "feature/x", "src")),
        ("git+ssh://git@host/a/repo", ("ssh://git@host/a/repo", "", "")),
        ("git+file:///srv/re@po/x@main", ("file:///srv/re@po/x", "main", "")),
    ],
)
def test_a_git_address_has_three_parts(text, parts):
    found = GitSource.parse(text)
    assert tuple(found) == parts and str(found) == text
    assert clone.Remote.parse(text) == clone.Remote(*parts)
