"""The page of a run, in a real browser over real runs of this machine: hostile, failed, gone; its log and its files."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from cloudtrain.events import State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from tests.conftest import wait_for
from tests.console.conftest import submit
from tests.console.test_security import ask

PAYLOAD = "<script>window.pwned=1</script><img src=x onerror='window.pwned=2'>{{window.pwned=3}}${window.pwned=4}`"
HOSTILE = (
    f"PAYLOAD = {PAYLOAD!r}\n"
    + """
import json, os
from pathlib import Path

out = Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"])
out.mkdir(parents=True, exist_ok=True)
(out / "notes.txt").write_text("what was made")
(out / (PAYLOAD.replace("/", "|")[:120] + ".bin")).write_bytes(b"\\0" * 10)
(out / "new\\nline \\u202etxt.exe").write_text("x")
(out / "leak").symlink_to("/etc/passwd")
(out / "folder").symlink_to("/etc")
(out / "up").symlink_to("../../..")
os.mkfifo(out / "pipe")
print("::cloudtrain::" + json.dumps({"kind": "metric", "step": 1, PAYLOAD: 1.5, "loss": 2.5}), flush=True)
print("::cloudtrain::" + json.dumps({"kind": "checkpoint", "step": 7, "path": PAYLOAD, "size_bytes": 12345}), flush=True)
checked = {"name": PAYLOAD, "devices": [{"name": PAYLOAD, "tflops": 612.5}], "faults": [[True, PAYLOAD]], "link": PAYLOAD}
print("::cloudtrain::" + json.dumps({"kind": "health", **checked}), flush=True)
print("::cloudtrain::" + json.dumps({"kind": "alarm", "reason": "health check: node 0 " + PAYLOAD}), flush=True)
for what, shown in [
    ("image", "PHN2ZyBvbmxvYWQ9IndpbmRvdy5wd25lZD0xIi8+"), ("image", PAYLOAD), ("text", {"text": PAYLOAD}), ("text", [PAYLOAD]),
    ("table", {"columns": [PAYLOAD, "b"], "rows": [[PAYLOAD, {"a": PAYLOAD}], []]}), ("table", {"columns": PAYLOAD}),
    ("histogram", {"counts": [PAYLOAD], "edges": [0, 1]}), (PAYLOAD, PAYLOAD),
]:
    told = {"kind": "media", "what": what, "name": PAYLOAD, "step": 1, "file": PAYLOAD, "_rank": 0, "part": 0, "parts": 1}
    print("::cloudtrain::" + json.dumps({**told, "shown": shown, "name": PAYLOAD + str(len(str(shown)))}), flush=True)
print(PAYLOAD)
print("\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07 \\x1b]8;;http://evil.example\\x07link \\u202egnp.exe \\x9b2J \\x00 end of escapes")
print("first\\rsecond\\rthird")
print("\\u0634\\u0628\\u0643\\u0629 right to left")
print("long " + "x" * 100_000)
raise ValueError(PAYLOAD)
"""
)

LAST = "parseInt([...document.querySelectorAll('.ct-log .ct-meta')].at(-1).textContent)"
SEEN = """(() => {
    const box = document.querySelector('.ct-log').getBoundingClientRect();
    const seen = [...document.querySelectorAll('.ct-log .ct-line')].filter(line => {
        const {top, bottom} = line.getBoundingClientRect();
        return bottom > box.top && top < box.bottom;
    });
    return [seen.at(0), seen.at(-1)].map(line => parseInt(line.querySelector('.ct-meta').textContent));
})()"""  # the first and the last line that stand in the box


@pytest.fixture(scope="module")
def hostile(console, tmp_path_factory) -> Run:
    """A run that failed, and in which every text that a job can choose is hostile."""
    folder = tmp_path_factory.mktemp("hostile") / "project"
    run = submit(console, folder, HOSTILE, PAYLOAD, hyperparameters={"note": PAYLOAD})
    run.wait(120)
    return run


def test_hostile_names_and_lines_are_text(console, page, hostile, seemly):
    page.on("dialog", lambda dialog: pytest.fail("a dialog was opened"))
    page.goto(f"{console.root}/runs/{hostile.run_id}")
    expect(page.locator(".ct-state").first).to_have_text("FAILED")
    log = page.locator(".ct-log")
    expect(log).to_contain_text(PAYLOAD)
    expect(log).to_contain_text("red  link \\u202egnp.exe")
    expect(log.get_by_text("third", exact=True)).to_be_visible()
    assert max(len(text) for text in log.locator(".ct-said").all_inner_texts()) <= 2000
    shown = page.locator("body").inner_text()
    assert not {letter for letter in shown if letter in "\x00\x07\x1b\x9b\u202e\u2066"}
    expect(page.get_by_role("region", name="Why it failed")).to_contain_text("exited with code 1")
    check = page.get_by_role("region", name="Check of the nodes", exact=True)
    expect(check).to_contain_text(f"health check: node 0 {PAYLOAD}")
    expect(check.get_by_role("table")).to_contain_text("612.5")
    page.get_by_text("Job", exact=True).click()
    expect(page.get_by_role("region", name="Job", exact=True)).to_contain_text("window.pwned")
    page.wait_for_function(
        "document.querySelectorAll('.ct-plots .js-plotly-plot .lines, .ct-plots .points').length >= 2"
    )
    assert page.evaluate("document.querySelectorAll('.ct-plots .js-plotly-plot').length") == 2
    assert page.evaluate("window.pwned") is None
    assert page.locator("main img, main script, main iframe").count() == 0
    expect(page.get_by_role("region", name="Checkpoints", exact=True)).to_contain_text("12 kB")
    expect(page.get_by_role("region", name="Logged", exact=True)).to_contain_text("<script>window.pwned=1</script>")
    seemly(page)
    assert page.evaluate("window.pwned") is None


LOGS = """
import os
import pathlib
import time
import cloudtrain_runtime as runtime

rank = int(os.environ["RANK"])
again = int(os.environ["CLOUDTRAIN_ATTEMPT"]) > 1
for step in range(6 if again else 0, 10):
    runtime.log_metrics(step=step, epoch=step / 5, loss=10 / (step + 1) - again + rank)
if rank == 0:
    for step in (5, 9):
        runtime.log_image("digits", [[(x * y * step) % 256 for x in range(64)] for y in range(48)], step=step)
        runtime.log_text("sample", f"Once upon a time, at step {step}", step=step)
    runtime.log_table("scores", [{"class": "cat", "f1": 0.75}, {"class": "dog", "f1": 0.5}], step=9)
    runtime.log_histogram("weights", [n % 7 for n in range(100)], step=9)
pathlib.Path(f"logged-{rank}-{again}").touch()
while not pathlib.Path(f"logged-{1 - rank}-{again}").exists():  # the first rank that fails ends the other
    time.sleep(0.01)
raise SystemExit(0 if again else 3)
"""


def test_curves_of_ranks_and_attempts_and_what_a_script_has_logged(console, page, seemly, picture, tmp_path):
    run = submit(console, tmp_path / "project", LOGS, processes_per_node=2)
    run.wait(120)
    run.resume()
    run.wait(120)
    page.goto(f"{console.root}/runs/{run.run_id}")
    curves = "[...document.querySelectorAll('.ct-plots .js-plotly-plot')].map(plot => plot.data || [])[0]"
    drawn = f"{curves}.map(line => [line.name, [...line.x], line.opacity || 1])"
    wait_for(lambda: page.evaluate(f"({drawn}).length") == 2)
    lost, kept = page.evaluate(drawn)
    assert (lost[1], lost[2], kept[1], kept[2]) == ([5, 6, 7, 8, 9], 0.3, list(range(10)), 1)
    page.get_by_label("rank", exact=True).click()
    page.get_by_role("option", name="all").click()
    wait_for(
        lambda: {name for name, *_ in page.evaluate(drawn)} == {"rank 0", "rank 1", "rank 0, lost", "rank 1, lost"}
    )
    page.get_by_label("axis").click()
    page.get_by_role("option", name="over epochs").click()
    wait_for(lambda: page.evaluate(drawn)[-1][1][-1] == 1.8)
    card = page.get_by_role("region", name="Logged", exact=True)
    expect(card.get_by_role("img", name="digits")).to_have_js_property("naturalWidth", 64)
    expect(card).to_contain_text("Once upon a time, at step 9")
    expect(card.get_by_role("region", name="scores")).to_contain_text("dog")
    card.get_by_label("step").nth(1).click()
    page.get_by_role("option", name="5", exact=True).click()
    expect(card).to_contain_text("Once upon a time, at step 5")
    seemly(page)
    picture(page, "logged", whole=True)
    run.fetch(tmp_path / "home")
    assert len(list((tmp_path / "home" / "outputs" / "logged").glob("digits-*.png"))) == 4, "of both attempts"


def test_an_ended_run_without_metrics_shows_what_to_write(console, page, seemly, tmp_path):
    run = submit(console, tmp_path / "project", "print('Goodness of fit -> chi2 = 0.5, ndf 3 <b>')")
    page.goto(f"{console.root}/runs/{run.run_id}")
    card = page.get_by_role("region", name="Curves", exact=True)
    expect(card).to_contain_text("no metrics were found in the log. The log lines most")
    expect(card).to_contain_text("ndf 3 <b>")
    expect(card).to_contain_text("metrics: {chi2:")
    seemly(page)


def test_a_run_that_waits_shows_why_and_since_when(console, page, seemly, tmp_path):
    (tmp_path / "train.py").write_text("print(1)")
    submitter, store = Submitter("local", home=console.home), Store(console.home)
    resolved = submitter.resolve({"source": str(tmp_path), "entrypoint": "train.py"}, ())
    plan = submitter.plan_of(resolved, submitter.package(resolved), None)
    assert store.intend(plan, identity="waits", owner=Process.here())
    store.accept(plan.attempt_id, "nowhere")
    assert store.lease(plan.run_id, Process.here(), 600)  # nobody else looks at it
    for reason in ("Slurm: Priority", f"Unschedulable: {PAYLOAD}"):
        status = Status(State.QUEUED, reason=reason)
        store.record(plan.attempt_id, status=status)
        store.set_status(plan.run_id, status)
    page.goto(f"{console.root}/runs/{plan.run_id}")
    card = page.get_by_role("region", name="Status", exact=True)
    expect(card).to_contain_text(f"Unschedulable: {PAYLOAD}")
    expect(card).to_contain_text(" UTC")
    page.get_by_text("2 events").click()
    expect(page.get_by_role("region", name="Events")).to_contain_text("platform  status QUEUED (Slurm: Priority)")
    assert page.evaluate("window.pwned") is None
    seemly(page)


def test_a_chain_is_shown_linked_and_cancelled_as_a_whole(console, page, seemly, picture, tmp_path):
    first = submit(console, tmp_path / "chain", "import time\ntime.sleep(600)\n", name="pretrain")
    second = submit(console, tmp_path / "chain", "print(1)\n", name="tune", after=[first.run_id])
    third = submit(console, tmp_path / "chain", "print(2)\n", name="rate", after=[second.run_id])
    page.goto(console.root)
    row = page.locator("tbody tr").filter(has=page.get_by_role("link", name=second.run_id))
    expect(row).to_contain_text(f"waits for {first.run_id}")
    picture(page, "console-chain")
    seemly(page)
    page.goto(f"{console.root}/runs/{second.run_id}")
    facts = page.get_by_role("region", name="Run", exact=True)
    expect(facts.get_by_role("link", name=third.run_id)).to_be_visible()
    expect(page.get_by_role("region", name="Status", exact=True)).to_contain_text(f"waits for {first.run_id}")
    picture(page, "console-chain-run")
    seemly(page)
    facts.get_by_role("link", name=first.run_id).click()
    expect(page.get_by_text(first.run_id, exact=True).first).to_be_visible()
    page.get_by_role("button", name="Cancel", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Runs that wait for it will be cancelled too:")
    expect(dialog).to_contain_text(second.run_id)
    expect(dialog).to_contain_text(third.run_id)
    dialog.get_by_role("button", name="Cancel the run").click()
    for run in (first, second, third):
        run.wait(240)
        assert run.record.status.state is State.CANCELLED, run.record.status
    assert second.record.status.reason == f"skipped: {first.run_id} was cancelled"
    page.goto(f"{console.root}/runs/{third.run_id}")
    expect(page.get_by_role("region", name="How it ended")).to_contain_text(f"skipped: {second.run_id} was cancelled")


def test_the_log_is_searched_and_filtered(console, page, hostile):
    page.goto(f"{console.root}/runs/{hostile.run_id}")
    lines = page.locator(".ct-log .ct-line")
    expect(page.locator(".ct-log")).to_contain_text("long xxx")
    every = lines.count()
    search = page.get_by_label("Search")
    search.fill("RIGHT TO left")
    expect(lines).to_have_count(1)
    expect(lines.first).to_contain_text("right to left")
    lines.first.click()  # among its neighbours
    expect(page.locator(".ct-log .ct-found")).to_contain_text("right to left")
    expect(lines).to_have_count(every)
    search.fill("nothing of the kind")
    expect(lines).to_have_count(0)
    search.fill("")
    page.get_by_label("From").click()
    page.get_by_role("option", name="node 0, launcher").click()
    expect(page.locator(".ct-log")).not_to_contain_text("long xxx")
    expect(page.locator(".ct-log")).to_contain_text("exited with code 1")


def test_a_long_log_is_gone_through_with_the_keyboard(console, page, tmp_path):
    run = submit(console, tmp_path / "project", "for n in range(3000): print(f'line {n} of many')")
    run.wait(120)
    shown = [line.seq for line in run.logs()]  # as `cloudtrain logs --number` prints them
    page.goto(f"{console.root}/runs/{run.run_id}")
    told = page.get_by_role("region", name="Log", exact=True).get_by_role("status")
    expect(told).to_contain_text(" of 3,")
    wait_for(lambda: page.evaluate(SEEN)[1] == page.evaluate(LAST))  # the newest, at first
    page.get_by_role("button", name="First").focus()
    page.keyboard.press("Enter")
    expect(told).to_contain_text("1 to 200 of")
    wait_for(lambda: page.evaluate(SEEN)[0] == shown[0])
    page.get_by_role("button", name="Later").focus()
    page.keyboard.press("Enter")
    expect(told).to_contain_text("201 to 400 of")
    wait_for(lambda: page.evaluate(SEEN)[0] == shown[200])
    page.get_by_role("button", name="Earlier").focus()
    page.keyboard.press("Enter")
    expect(told).to_contain_text("1 to 200 of")
    wait_for(lambda: page.evaluate(SEEN)[1] == shown[199])  # reading goes on where it was
    page.get_by_label("Line", exact=True).fill(str(shown[1499]))
    page.keyboard.press("Enter")
    found = page.locator(".ct-log .ct-found")
    expect(found.locator(".ct-meta")).to_contain_text(f"{shown[1499]}  ")
    wait_for(lambda: page.evaluate(SEEN)[0] < shown[1499] < page.evaluate(SEEN)[1])
    page.get_by_label("Search").fill("line 2345 of")
    expect(page.locator(".ct-log .ct-line")).to_have_count(1)
    page.locator(".ct-log").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(found).to_contain_text("line 2345 of many")
    first, last = page.evaluate(SEEN)
    assert first < int(found.locator(".ct-meta").inner_text().split()[0]) < last


def test_files_are_downloaded_and_nothing_beside_them(console, page, hostile):
    page.goto(f"{console.root}/runs/{hostile.run_id}")
    with page.expect_download() as got:
        page.get_by_role("link", name="outputs/notes.txt").click()
    assert Path(got.value.path()).read_text() == "what was made"
    assert got.value.suggested_filename == "notes.txt"
    with page.expect_download() as got:
        page.get_by_role("link", name="outputs/<script>").click()
    assert Path(got.value.path()).read_bytes() == b"\0" * 10
    names = page.get_by_role("region", name="Files").locator("a").all_inner_texts()
    assert len(names) == 3, names  # neither links nor the pipe
    files = f"/runs/{hostile.run_id}/files/"
    answer = ask(console, files + "outputs/notes.txt", Cookie=console.cookie)
    assert (answer.status, answer.body) == (200, b"what was made")
    assert answer.headers["Content-Disposition"].startswith("attachment")
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Security-Policy"].startswith("sandbox")
    outside = [
        "outputs/leak", "outputs/folder/passwd", "outputs/up/a1/request.json", "outputs/pipe", "outputs", "outputs/",
        "../../history.sqlite3", "outputs/../a1/request.json", "a1/request.json", "outputs/%2e%2e/a1/request.json",
        "..%2f..%2fhistory.sqlite3", "outputs%2f..%2fa1%2frequest.json", "%2fetc%2fpasswd", "/etc/passwd", "",
        "outputs/notes.txt%00", "outputs//notes.txt", "outputs/./notes.txt", "outputs/nothing", "outputs/" + "x" * 3000,
    ]  # fmt: skip
    assert (console.home / "runs" / hostile.run_id / "a1" / "request.json").is_file()
    for path in outside:
        answer = ask(console, files + path, Cookie=console.cookie)
        assert answer.status == 404, path
        assert b"root:" not in answer.body and b"SQLite" not in answer.body
    for run_id in ("..", ".", "%2e%2e", hostile.run_id[:-1], "nobody"):
        assert ask(console, f"/runs/{run_id}/files/outputs/notes.txt", Cookie=console.cookie).status == 404, run_id
    assert ask(console, files + "outputs/notes.txt").status == 403  # without the token


def test_what_there_is_not_is_said_in_a_sentence(console, page, hostile, seemly):
    for run_id in ("nobody", hostile.run_id[:-2], quote("<script>window.pwned=1", safe="")):
        page.goto(f"{console.root}/runs/{run_id}")
        expect(page.locator("main")).to_contain_text("no run has the id")
        assert page.evaluate("window.pwned") is None
    seemly(page)


def test_a_run_whose_folder_is_gone_is_still_shown(console, page, tmp_path):
    run = submit(console, tmp_path / "project", "print('all of it')")
    run.wait(120)
    folder = console.home / "runs" / run.run_id
    os.rename(folder, tmp_path / "gone")
    page.goto(f"{console.root}/runs/{run.run_id}")
    expect(page.locator(".ct-state").first).to_have_text("SUCCEEDED")
    expect(page.get_by_text(f"The folder {folder} is missing")).to_be_visible()
    expect(page.get_by_text("The run has no files here.")).to_have_count(0)
