"""The form New job in a real Chromium, up to a run that has finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

from cloudtrain.events import State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.source.node_code import CALL
from tests.conftest import wait_for
from tests.console.test_history import plan as plan_of

SCRIPT = "import sys\nprint('given', sys.argv[1:])\n"
HOSTILE = "<img src=x onerror=document.title=1>"


@pytest.fixture(scope="module")
def project(console) -> Path:
    """The folder in which the console was started, with a script and configured targets."""
    folder = console.home.parent
    (folder / "train.py").write_text(SCRIPT)
    (folder / "cloudtrain.toml").write_text('[targets.mine]\nbackend = "ssh"\nuser = "someone"\n')
    (folder / ".cloudtrainignore").write_text("/home/\n/cache/\n/config/\n/console.err\n")
    return folder


@pytest.fixture(scope="module")
def ran(console, project) -> Run:
    """A run that has succeeded."""
    job = {"name": "before", "source": str(project), "entrypoint": "train.py",
           "hyperparameters": {"lr": "1e-4", "layers": [2, 4]}, "labels": {"team": HOSTILE}}  # fmt: skip
    run = Submitter(home=console.home).submit(job)
    assert run.wait(120).state is State.SUCCEEDED
    return run


@pytest.fixture
def form(page, console, project) -> Page:
    """A blank form."""
    return opened(page, console, "")


def opened(page: Page, console, query: str) -> Page:
    page.goto(f"{console.root}/new{query}")
    expect(tab(page, "general")).to_be_visible()
    page.wait_for_url("**/new?draft=*")
    return page


def tab(page: Page, step: str) -> Locator:
    return page.locator(f"[data-step={step}]")


def turn(page: Page, step: str) -> None:
    tab(page, step).click()
    expect(tab(page, step)).to_have_attribute("aria-selected", "true")


def field(page: Page, name: str) -> Locator:
    return page.locator(f'[data-field="{name}"]')


def around(control: Locator) -> Locator:
    """Return the whole of a control, with what is said below it."""
    return control.locator("xpath=ancestor::*[contains(concat(' ', @class, ' '), ' q-field ')][1]")


def add(page: Page, name: str, key: str, value: str) -> None:
    """Fill the last row of a mapping."""
    page.locator(f'[data-name="{name}"]').last.fill(key)
    page.locator(f'[data-value="{name}"]').last.fill(value)


def reviewed(page: Page) -> None:
    """Turn to the review, and wait for its plan."""
    turn(page, "review")
    expect(page.get_by_text("This request will be sent.")).to_be_visible()
    expect(submit(page)).to_be_enabled()


def submit(page: Page) -> Locator:
    return page.locator("[data-submit]")


def planned(project: Path, home: Path, name: str) -> dict:
    """Return the plan that the command line makes of a job file."""
    done = subprocess.run(
        [sys.executable, "-m", "cloudtrain", "plan", name, "--json"], cwd=project, check=True, capture_output=True,
        env={**os.environ, "CLOUDTRAIN_HOME": str(home)}, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_from_a_blank_form_to_a_finished_run(form, console, project, picture, census):
    field(form, "name").fill("tiny")
    expect(field(form, "entrypoint")).to_have_value("train.py")  # the folder has one
    add(form, "hyperparameters", "lr", "1e-4")
    form.get_by_role("button", name="Add hyperparameter").click()
    expect(form.locator('[data-name="hyperparameters"]')).to_have_count(2)
    add(form, "hyperparameters", "tag", "a b")
    form.evaluate("scrollTo(0, 0)")
    picture(form, "new-general")
    form.get_by_role("button", name="Next: Infrastructure").click()
    field(form, "limits.max_runtime").fill("10m")
    expect(form.get_by_text("backend local")).to_be_visible()  # doctor's last finding
    form.evaluate("scrollTo(0, 0)")
    picture(form, "new-infrastructure")
    turn(form, "source")
    expect(form.get_by_role("cell", name="train.py")).to_be_visible()
    picture(form, "new-source")
    turn(form, "review")
    form.get_by_role("button", name="Save job file").click()
    expect(form.get_by_text(f"Written to {project / 'job.yaml'}")).to_be_visible()
    turn(form, "source")
    expect(form.get_by_role("cell", name="job.yaml")).to_have_count(0)  # of the listing before
    reviewed(form)
    picture(form, "new-review", whole=True)
    submit(form).click()
    form.wait_for_url("**/runs/tiny-*")
    run = Run.find(form.url.rpartition("/")[2], console.home)
    wait_for(lambda: run.record.status.state.final, "the run's end")
    assert run.record.status.state is State.SUCCEEDED
    expect(form.get_by_text("SUCCEEDED").first).to_be_visible()
    assert [line.text for line in run.logs() if line.rank == 0] == ["given ['--lr', '1e-4', '--tag', 'a b']"]
    sent, written = run.attempts[0].plan, planned(project, console.home, "job.yaml")
    assert "lr: 1e-4\n" in (project / "job.yaml").read_text()
    plain = json.loads(sent.to_json().replace(sent.run_id, "RUN"))
    again = json.loads(json.dumps(written).replace(written["run_id"], "RUN"))
    for plan in (plain, again):  # the run's own id is packed in there
        plan["request"]["nodes"][0]["env"].pop("CLOUDTRAIN_MANIFEST_0")
    assert plain == again


def test_every_problem_is_said_at_its_field_and_counted_at_its_step(form, console):
    count = len(Store(console.home).names())
    field(form, "name").fill("No Name")
    add(form, "hyperparameters", "layers", "[1, 2")
    value = form.locator('[data-value="hyperparameters"]').last
    expect(around(value)).to_contain_text("this is not valid YAML")
    value.fill("[1, 2]")
    expect(around(field(form, "name"))).to_contain_text("is not a valid job name")
    turn(form, "infrastructure")
    field(form, "num_nodes").fill("two")
    field(form, "resources.accelerators").fill("8xA100")
    add(form, "env", "RANK", "1")
    expect(around(field(form, "num_nodes"))).to_contain_text("must be a whole number")
    expect(around(field(form, "resources.accelerators"))).to_contain_text("write A100:8")
    expect(around(form.locator('[data-value="env"]'))).to_contain_text("is set by cloudtrain")
    expect(tab(form, "general").locator(".ct-count")).to_have_text("1")
    expect(tab(form, "infrastructure").locator(".ct-count")).to_have_text("3")
    turn(form, "review")
    expect(form.get_by_text("4 problems to fix")).to_be_visible()
    expect(submit(form)).to_be_disabled()
    submit(form).dispatch_event("click")
    form.locator("li", has_text="num_nodes").get_by_role("button").click()
    expect(tab(form, "infrastructure")).to_have_attribute("aria-selected", "true")
    field(form, "num_nodes").fill("2")
    expect(tab(form, "infrastructure").locator(".ct-count")).to_have_text("2")
    assert len(Store(console.home).names()) == count


def test_a_run_opens_with_its_values_and_is_run_again_with_one_changed(page, console, ran, picture, census):
    opened(page, console, f"?run={quote(ran.run_id)}")
    expect(page.get_by_role("heading", name="Rerun with changes")).to_be_visible()
    values = page.locator('[data-value="hyperparameters"]')
    expect(values).to_have_count(2)
    expect(values.first).to_have_value("1e-4")
    expect(page.get_by_text("was lr: 1e-4")).to_have_count(0)
    values.first.fill("2e-4")
    expect(page.get_by_text("was lr: 1e-4")).to_be_visible()
    reviewed(page)
    row = page.get_by_role("row", name="hyperparameters.lr")
    expect(row).to_contain_text("1e-4")
    expect(row).to_contain_text("2e-4")
    picture(page, "new-rerun")
    submit(page).click()
    page.wait_for_url("**/runs/before-*")
    made = Run.find(page.url.rpartition("/")[2], console.home)
    assert made.run_id != ran.run_id and made.record.parent == ran.run_id
    before, after = dict(ran.record.job), dict(made.record.job)
    assert after.pop("hyperparameters") == {"lr": "2e-4", "layers": ["2", "4"]}
    before.pop("hyperparameters")
    assert after == before
    assert made.attempts[0].plan.bundle == ran.attempts[0].plan.bundle
    assert made.wait(120).state is State.SUCCEEDED


def test_a_rerun_marks_each_changed_value(page, console, ran):
    opened(page, console, f"?run={quote(ran.run_id)}")
    expect(page.locator('[data-value="hyperparameters"]')).to_have_count(2)
    expect(page.locator(".ct-changed")).to_have_count(0)
    page.locator('[data-value="hyperparameters"]').first.fill("2e-4")
    marks = page.locator(".ct-pair.ct-changed .ct-was")
    expect(marks).to_have_text("was lr: 1e-4")
    page.get_by_role("button", name="Add hyperparameter").click()
    expect(page.locator('[data-value="hyperparameters"]')).to_have_count(3)
    add(page, "hyperparameters", "seed", "1")
    expect(marks.nth(1)).to_have_text("new")
    page.get_by_role("button", name="Remove hyperparameter 2").click()
    expect(page.get_by_text("removed: layers: [2, 4]")).to_be_visible()
    expect(marks).to_have_text(["was lr: 1e-4", "new"])
    page.locator('[data-value="hyperparameters"]').first.fill("1e-4")
    expect(marks).to_have_text(["new"])


def test_the_listing_follows_the_typed_source(form, project):
    (project / "other").mkdir()
    (project / "other" / "two.py").write_text(SCRIPT)
    turn(form, "source")
    expect(form.get_by_role("cell", name="cloudtrain.toml")).to_be_visible()
    field(form, "source").fill("other")
    expect(form.get_by_role("cell", name="two.py", exact=True)).to_be_visible()
    expect(form.get_by_role("cell", name="cloudtrain.toml")).to_have_count(0)
    form.get_by_text("A git repository", exact=True).click()
    expect(form.get_by_text("The repository is fetched when you list its files.")).to_be_visible()
    expect(form.get_by_role("cell", name="two.py")).to_have_count(0)


def test_a_double_click_is_one_run(form, console, census):
    before = set(Store(console.home).names())
    field(form, "name").fill("twice")
    reviewed(form)
    submit(form).evaluate("button => { button.click(); button.click(); button.click() }")
    form.wait_for_url("**/runs/twice-*")
    new = set(Store(console.home).names()) - before
    assert new == {form.url.rpartition("/")[2]}
    run = Run.find(new.pop(), console.home)
    assert run.wait(120).state is State.SUCCEEDED and len(run.attempts) == 1


def test_nothing_is_saved_outside_or_over_another_file(form, console, project):
    outside = project.parent / f"{project.name}-outside.yaml"
    (project / "kept.yaml").write_text("name: kept\n")
    reviewed(form)
    for name, said in (
        (f"../{outside.name}", "is outside"),
        (".hidden.yaml", "is hidden"),
        ("x.py", "must end in .yaml"),
    ):
        field(form, "file").fill(name)
        form.get_by_role("button", name="Save job file").click()
        expect(form.get_by_role("alert").filter(has_text=said).first).to_be_visible()
    assert not outside.exists()
    field(form, "file").fill("kept.yaml")
    form.get_by_role("button", name="Save job file").click()
    form.get_by_role("button", name="Leave it").click()
    expect(form.get_by_role("button", name="Leave it")).to_have_count(0)
    assert (project / "kept.yaml").read_text() == "name: kept\n"
    form.get_by_role("button", name="Save job file").click()
    form.get_by_role("button", name="Overwrite it").click()
    expect(form.get_by_text(f"Written to {project / 'kept.yaml'}")).to_be_visible()
    assert "entrypoint: train.py" in (project / "kept.yaml").read_text()
    (project / "kept.yaml").unlink()


def test_a_job_file_opens_and_hostile_text_stays_text(page, console, project):
    (project / "odd.yaml").write_text(
        f"# head\nname: odd\nentrypoint: train.py\nlabels: {{team: '{HOSTILE}'}}\nhyperparameters: {{lr: 1.10}}\n"
        f"strange: '{HOSTILE}'\n"
    )
    opened(page, console, "?job=odd.yaml")
    expect(field(page, "name")).to_have_value("odd")
    expect(page.locator('[data-value="hyperparameters"]')).to_have_value("1.10")
    turn(page, "review")
    expect(page.locator("li", has_text="strange")).to_contain_text("is not a known key")
    expect(page.get_by_role("region", name="Job file")).to_contain_text(HOSTILE)
    assert page.title() != "1" and page.locator("img").count() == 0
    (project / "odd.yaml").unlink()


def test_roles_and_the_call_of_a_function_are_shown_as_what_they_are(page, console, project, seemly):
    (project / "rl.yaml").write_text(
        "name: rl # kept\nroles:\n  trainer: {entrypoint: train.py, num_nodes: 2}\n  server: {run: python serve.py}\n"
    )
    opened(page, console, "?job=rl.yaml")
    roles = page.get_by_role("region", name="Roles of the job")
    expect(roles.locator("tbody td")).to_have_text(
        ["trainer (main)", "2", "train.py", "server", "1", "python serve.py"]
    )
    field(page, "name").fill("rl2")
    turn(page, "review")
    expect(page.get_by_role("region", name="Job file")).to_contain_text("name: rl2 # kept")
    (project / "rl.yaml").unlink()
    store, job = Store(console.home), {"name": "square", "source": ".", "entrypoint": CALL, "args": ["--digest", "f00"]}
    assert store.intend(replace(plan_of("square-1"), job=job), identity="i", owner=Process.here())
    store.accept("square-1-a1", "h")
    store.set_status("square-1", Status(State.SUCCEEDED, 0, "", "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"))
    store.acknowledge("square-1")
    opened(page, console, "?run=square-1")
    expect(page.get_by_role("region", name="Function")).to_contain_text("call the function in Python again")
    expect(field(page, "name")).to_have_value("square")
    expect(field(page, "args")).to_have_count(0)
    seemly(page)


@pytest.mark.parametrize("name", ["../../etc/passwd", HOSTILE])
def test_only_job_files_below_the_folder_open(page, console, project, name):
    page.goto(f"{console.root}/new?job={quote(name)}")
    expect(page.get_by_role("heading", name="Error")).to_be_visible()
    assert page.locator("img").count() == 0


def test_the_trainers_own_arguments_are_offered_and_checked(form, picture):
    form.get_by_text("The shared trainer", exact=True).click()
    expect(field(form, "entrypoint")).to_have_count(0)
    field(form, "hyperparameters.dataset").fill("python-stdlib")
    field(form, "hyperparameters.learning_rate").fill("fast")
    expect(around(field(form, "hyperparameters.learning_rate"))).to_contain_text("takes a number, not 'fast'")
    field(form, "hyperparameters.learning_rate").fill("3.0e-3")
    field(form, "more-arguments").fill("eval_on")
    form.get_by_role("option", name="eval_on_start").click()
    field(form, "hyperparameters.eval_on_start").click()
    form.get_by_role("option", name="false", exact=True).click()
    expect(tab(form, "general").locator(".ct-count")).to_be_hidden()
    form.evaluate("scrollTo(0, 0)")
    picture(form, "new-trainer", whole=True)
    reviewed(form)
    file = form.get_by_role("region", name="Job file")
    expect(file).to_contain_text('learning_rate: 3.0e-3\n  eval_on_start: "false"', use_inner_text=True)
    expect(form.get_by_text("--learning_rate 3.0e-3 --eval_on_start false")).to_be_visible()


def test_a_target_brings_its_own_options_and_findings(form, console):
    turn(form, "infrastructure")
    field(form, "target").click()
    form.get_by_role("option", name="mine", exact=True).click()
    expect(form.get_by_role("heading", name="Options of ssh")).to_be_visible()
    form.locator(".ct-more", has_text="user").click()
    expect(field(form, "options.ssh.user")).to_have_attribute("placeholder", "someone (cloudtrain.toml)")
    form.get_by_role("button", name="Check", exact=True).click()
    found = form.locator(".ct-findings li", has_text="target mine")
    expect(found.first).to_contain_text("problem")
    expect(form.get_by_role("button", name="Check", exact=True)).to_be_enabled()


def test_refused_credentials_are_shown_with_the_listing(form, project):
    (project / ".env").write_text("TOKEN=x\n")
    turn(form, "source")
    expect(form.locator(".ct-callout")).to_contain_text("environment file")
    expect(form.get_by_role("cell", name=".env", exact=True)).to_be_visible()
    (project / ".env").unlink()


def test_the_keyboard_is_enough_and_a_reload_keeps_the_form(form):
    form.keyboard.press("Escape")
    tab(form, "general").focus()
    form.keyboard.press("ArrowRight")
    form.keyboard.press("Enter")
    expect(tab(form, "infrastructure")).to_have_attribute("aria-selected", "true")
    field(form, "num_nodes").focus()
    form.keyboard.type("2")
    turn(form, "review")
    expect(form.get_by_role("region", name="Job file")).to_contain_text("num_nodes: 2")
    form.reload()
    turn(form, "infrastructure")
    expect(field(form, "num_nodes")).to_have_value("2")


def test_a_repository_is_listed_when_it_is_asked_for_and_pinned(form, tmp_path):
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "train.py").write_text(SCRIPT)
    for words in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=origin, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=origin, check=True, capture_output=True, text=True).stdout
    turn(form, "source")
    form.get_by_text("A git repository", exact=True).click()
    expect(around(field(form, "source"))).to_contain_text("is not a folder or a git address")
    field(form, "source").fill(f"file://{origin}")
    field(form, "source.revision").fill("trunk")
    form.get_by_role("button", name="List the files").click()
    expect(form.get_by_text(f"at {commit[:12]}")).to_be_visible()
    reviewed(form)
    expect(form.get_by_role("region", name="Job file")).to_contain_text(f"source: git+file://{origin}@trunk")
    expect(form.get_by_text(f"git+file://{origin}@{commit.strip()}")).to_be_visible()


def test_every_step_is_seemly(form, seemly):
    field(form, "name").fill("No Name")
    expect(around(field(form, "name"))).to_contain_text("is not a")
    seemly(form)
    field(form, "name").fill("seemly")
    turn(form, "infrastructure")
    expect(form.get_by_text("backend local")).to_be_visible()
    seemly(form)
    turn(form, "source")
    expect(form.get_by_role("cell", name="train.py")).to_be_visible()
    seemly(form)
    reviewed(form)
    seemly(form)


def test_it_is_usable_at_400_pixels(form, picture):
    form.set_viewport_size({"width": 400, "height": 800})
    field(form, "name").fill("narrow")
    picture(form, "new-narrow")
    turn(form, "infrastructure")
    expect(form.get_by_text("backend local")).to_be_visible()
    picture(form, "new-narrow-infrastructure", whole=True)
    reviewed(form)
    submit(form).scroll_into_view_if_needed()
    expect(submit(form)).to_be_in_viewport()
