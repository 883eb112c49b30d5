"""Law 2: arguments arrive as written.

Hypothesis makes the values; some hundreds of them travel in one job, through job file, `--set`, plan file, manifest and
the real launcher, to a script that reads them with a real parser and writes down what it saw.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cloudtrain.backends.api import Plan
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from tests.conftest import WAIT_S
from tests.job.test_arguments import TEXT, alike
from tests.seed import first_seed

SCRIPTS = Path(__file__).with_name("scripts")
PARSERS = {"argparse": "argparse", "click": "argparse", "hf": "hf", "hydra": "hydra"}  # parser -> arg_style
CASES = 10_000
IN_A_JOB = 500
JOBS = CASES // IN_A_JOB // len(PARSERS)
TRAPS = """
on off yes no y n On NO Yes Off N Y ON none None NaN nan inf Infinity 1:30 12:30:45 190:20:30 0123 007 08 0o17
0x1F 0b11 1.10 1.0 1. .5 5e3 1e-4 3.0e-4 1E5 1e400 1_000 +1 -1 -0 -.5 -1e-5 .inf -.inf .NaN 2026-11-20
2001-12-14t21:59:43.10-05:00
0.1e1 00 1,000 12e03 685_230.15 = 9007199254740993 123456789012345678901234567890 0.1000000000000000055511151231257827
truE nuLL a:b http://x:80/y?z=%20 ~/data 1e-4f 1.2.3 50% a#b""".split()  # noqa: SIM905


class Case(NamedTuple):
    """A value: how it is written in YAML, how after `--set key=`, and what the script must see."""

    kind: str
    yaml: str
    set: str
    seen: object


def quoted(text: str, style: int) -> str:
    """Return YAML for a text: in double quotes, escaped to ASCII or not, or in single quotes where those can hold it."""
    if style == 0 and text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    if style == 1:  # beyond 16 bits JSON writes two escapes, which YAML does not know; it has one of its own
        escaped = (f"\\U{ord(letter):08X}" if letter > "\uffff" else json.dumps(letter)[1:-1] for letter in text)
        return f'"{"".join(escaped)}"'
    return json.dumps(text, ensure_ascii=False)


def text_case(text: str, style: int) -> Case:
    words = ("", "~", "null", "Null", "NULL", "true", "True", "TRUE", "false", "False", "FALSE")
    plain = text not in words and text[:1] not in ("[", "{", '"', "'")
    return Case("text", quoted(text, style), text if plain else quoted(text, style), text)


def list_case(items: list[Case]) -> Case:
    written = "[" + ", ".join(item.yaml for item in items) + "]"
    return Case("list", written, written, [item.seen for item in items])


STYLE = st.integers(0, 2)
TEXTS = st.builds(text_case, TEXT, STYLE)
NUMBERS = (
    st.integers().map(str)
    | st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.from_regex(r"-?[0-9]{1,6}\.[0-9]{1,6}(e[-+]?[0-9]{1,2})?", fullmatch=True)
)
WRITTEN = st.builds(lambda text: Case("text", text, text, text), NUMBERS | st.sampled_from(TRAPS))
FLAGS = st.sampled_from([Case("flag", word, word, word == "true") for word in ("true", "false")])
ITEM = TEXTS | st.builds(
    lambda text: Case("text", text, text, text), st.sampled_from(["1", "0.10", "1e-4", "on", "0123"])
)
LISTS = st.lists(ITEM, min_size=1, max_size=4).map(list_case)


def readable(case: Case, parser: str) -> bool:
    """Return whether the parser has a form for the value; what has none is refused, which test_arguments.py proves."""
    if case.kind != "list" or parser == "hydra":
        return True
    items = [str(item) for item in case.seen]
    return len(items) == 1 or not any(
        re.match(r"-[\s\S]", item) and not re.fullmatch(r"-[0-9.]+", item) for item in items
    )


def generated(strategy: st.SearchStrategy[Case], count: int, number: int) -> list[Case]:
    """Return so many cases, the same for the same number."""
    found: list[Case] = []

    @seed(number)
    @settings(
        max_examples=count // 20 + 5,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(strategy, min_size=20, max_size=20))
    def collect(cases: list[Case]) -> None:
        found.extend(cases)

    collect()
    assert len(found) >= count
    return found[:count]


class Letter:
    """One job with hundreds of values, some in its file and some set over it, and what its script must see."""

    def __init__(self, folder: Path, parser: str, hyperparameters: list[Case], env: list[Case], args: list[Case]):
        self.folder, self.parser = folder, parser
        choose = random.Random(len(hyperparameters))
        names = {f"{choose.choice(self.heads)}{n}": case for n, case in enumerate(hyperparameters)}
        variables = {f"LAW_{n}": case for n, case in enumerate(env)}
        self.cases = len(hyperparameters) + len(env) + len(args)
        self.sets: list[str] = []
        lines = [f"arg_style: {PARSERS[parser]}", "name: law-2", "entrypoint: script.py", "hyperparameters:"]
        lines += self.written("hyperparameters", names, choose) + ["env:"] + self.written("env", variables, choose)
        lines += ["args:", *(f"- {case.yaml}" for case in args)]
        self.expected = {
            "hyperparameters": {name: case.seen for name, case in names.items()},
            "env": {name: case.seen for name, case in variables.items()},
            "args": [case.seen for case in args],
        }
        folder.mkdir(parents=True)
        shutil.copy(SCRIPTS / f"{parser}_style.py", folder / "script.py")
        shutil.copy(SCRIPTS / "seen.py", folder)
        kinds = {name: self.kind(case) for name, case in names.items()}
        (folder / "keys.json").write_text(json.dumps({"keys": kinds, "args": len(args)}))
        (folder / "job.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    @property
    def heads(self) -> list[str]:
        """What names begin with: whatever is a name to the parser."""
        return {"hf": ["k", "learning_rate_", "é"], "hydra": ["k", "a.b", "+n.x-", "L"]}.get(
            self.parser, ["k", "learning-rate-", "a.b.", "é", "L_"]
        )

    def kind(self, case: Case) -> str:
        several = self.parser == "click" and case.kind == "list"
        return f"list{len(case.seen)}" if several else case.kind

    def written(self, section: str, cases: dict[str, Case], choose: random.Random) -> list[str]:
        """Return the lines of a section; every third value is set over it instead, of those half over another one."""
        lines = []
        for name, case in cases.items():
            where = choose.randrange(6)
            if where < 2:
                self.sets.append(f"{section}.{name}={case.set}")
            if where > 0:
                lines.append(f"  {json.dumps(name)}: {case.yaml if where > 1 else 'replaced'}")
        return lines

    def compare(self, seen: dict) -> None:
        for part, expected in self.expected.items():
            assert len(seen[part]) == len(expected), f"{self.parser}: {part}: {len(seen[part])} of {len(expected)}"
            wanted = dict(enumerate(expected)) if part == "args" else expected
            got = dict(enumerate(seen[part])) if part == "args" else seen[part]
            wrong = [(at, want, got.get(at)) for at, want in wanted.items() if not alike(want, got.get(at))]
            assert not wrong, f"{self.parser}: {part}: {wrong[:5]}"


def letters(folder: Path, parser: str, jobs: int, number: int) -> list[Letter]:
    hyper = TEXTS | TEXTS | WRITTEN | FLAGS | LISTS.filter(lambda case: readable(case, parser))
    each = {"hyperparameters": (hyper, 350), "env": (TEXTS | WRITTEN, 50), "args": (TEXTS | WRITTEN, 100)}
    made = {name: generated(strategy, count * jobs, number) for name, (strategy, count) in each.items()}
    return [
        Letter(
            folder / f"job-{n}",
            parser,
            **{name: made[name][n * count : (n + 1) * count] for name, (_, count) in each.items()},
        )
        for n in range(jobs)
    ]


def sent(letter: Letter, home: Path) -> dict:
    """Plan the job, keep the plan in a file, submit that, and return what the script saw."""
    submitter = Submitter(home=home, watch=False)
    plan = submitter.plan(letter.folder / "job.yaml", sets=letter.sets)
    file = letter.folder.with_suffix(".plan.json")
    file.write_text(plan.to_json(), encoding="utf-8")
    return seen_by(submitter.submit_plan(Plan.from_json(file.read_text(encoding="utf-8"))))


def sent_by_hand(letter: Letter, home: Path) -> dict:
    """The same through the real command line."""
    program = [sys.executable, "-m", "cloudtrain.cli"]
    file = letter.folder.with_suffix(".plan.json")
    sets = [f"--set={text}" for text in letter.sets]
    for command in (["plan", "job.yaml", *sets, "-o", str(file)], ["submit", str(file), "--wait"]):
        done = subprocess.run(
            [*program, *command], cwd=letter.folder, capture_output=True, text=True, timeout=WAIT_S, errors="replace"
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return seen_by(Run.find(home=home))


def seen_by(run: Run) -> dict:
    status = run.wait(WAIT_S)
    assert status.state is State.SUCCEEDED, [line.text for line in run.logs()][-20:]
    return json.loads((run.store.home / "runs" / run.run_id / "outputs" / "seen.json").read_text())


@pytest.mark.parametrize("jobs", [2, pytest.param(JOBS, marks=pytest.mark.long)])
@pytest.mark.parametrize("parser", PARSERS)
def test_any_value_arrives_as_written(home, tmp_path, parser, jobs, figure):
    made = letters(tmp_path / "jobs", parser, jobs, first_seed())
    for n, letter in enumerate(made):
        letter.compare((sent if n else sent_by_hand)(letter, home))
    figure("values", sum(letter.cases for letter in made))
    figure("of them set with --set", sum(len(letter.sets) for letter in made))
    figure("runs through the real launcher", len(made))


@pytest.mark.parametrize("parser", PARSERS)
def test_what_yaml_would_turn_into_something_else(home, tmp_path, parser, figure):
    cases = [Case("text", text, text, text) for text in TRAPS]
    letter = Letter(tmp_path / "job", parser, cases, cases, cases)
    letter.compare(sent(letter, home))
    figure("traps of YAML, as hyperparameter, variable and argument", len(TRAPS))


@pytest.mark.parametrize("style", ["argparse", "hf", "hydra"])
def test_each_trap_by_itself(tmp_path, style):
    (tmp_path / "train.py").touch()
    for trap in TRAPS:
        text = f"entrypoint: train.py\narg_style: {style}\nhyperparameters:\n  k: {trap}\nenv:\n  K: {trap}\nargs:\n- {trap}\n"
        job = Job.load(text, [f"hyperparameters.l={trap}", f"env.L={trap}"])
        assert [str(value) for value in job.hyperparameters.values()] == [trap, trap]
        assert (job.env, job.args) == ({"K": trap, "L": trap}, [trap])
