"""Mutants of the reference backend: each has one fault that the contract suite has to find.

A mutant is an operator, applied to one place: a class body that overrides methods of `Reference`. docs/contract.py runs
each against the whole suite. A mutant that survives stays in the table, and SURVIVORS says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

OPERATORS = {
    "forget": "a call does nothing, always or in some states",
    "report": "a state, code or time is reported as another one",
    "decay": "a right answer becomes a wrong one, later or after another call",
    "leak": "the secret is written to one more place",
    "lose": "lines or files are left out or cut",
    "repeat": "lines come twice, or an attempt starts twice",
    "alter": "a text is changed on its way",
    "widen": "a name is matched by a part of it",
    "nothing": "a call of the backend `local` does nothing",
    "twice": "a call of the backend `local` does what it does twice",
    "another": "a call of the backend `local` acts on another attempt, where there is one",
    "depend": "the answer depends on the object, clock, locale, umask, working directory or chance",
}


class Mutant(NamedTuple):
    """One fault: which operator made it, and the body of the faulty class."""

    operator: str
    body: str


def status_as(change: str, when: str) -> str:
    """Return a body that reports another status where a condition on `status` holds."""
    return (
        "def status(self, handle):\n"
        "    status = super().status(handle)\n"
        f"    return replace(status, {change}) if {when} else status\n"
    )


def lines_as(expression: str) -> str:
    """Return a body whose log is what an expression makes of the list `lines`; while it is followed nothing is changed."""
    return (
        "def logs(self, handle, *, follow=False, after=None):\n"
        "    if follow:\n"
        "        yield from super().logs(handle, follow=True, after=after)\n"
        "        return\n"
        "    lines = list(super().logs(handle, after=after))\n"
        f"    yield from {expression}\n"
    )


def text_as(expression: str) -> str:
    """Return a body that changes the text of every line of a rank."""
    return (
        "def logs(self, handle, *, follow=False, after=None):\n"
        "    for line in super().logs(handle, follow=follow, after=after):\n"
        f"        yield line if line.rank < 0 else line._replace(text={expression.replace('text', 'line.text')})\n"
    )


def without_files(condition: str) -> str:
    """Return a body whose fetch removes files for which a condition on `path` holds."""
    return (
        "def fetch(self, handle, into, what=FETCHABLE):\n"
        "    super().fetch(handle, into, what)\n"
        "    for path in [path for path in into.rglob('*') if path.is_file()]:\n"
        f"        if {condition}: path.unlink()\n"
        "    return into\n"
    )


def leak(statement: str) -> str:
    """Return a body that does something with the `secret` before the launcher starts."""
    return (
        "def launch(self, node, argv, env, given):\n"
        "    for secret in given['secrets'].values():\n"
        f"        {statement}\n"
        "    super().launch(node, argv, env, given)\n"
    )


def job_as(change: str) -> str:
    """Return a body that plans another job."""
    return f"def plan(self, job, *a):\n    return super().plan(job.model_copy(update={{{change}}}), *a)\n"


def noted(expression: str) -> str:
    """Return a body whose plan has a note that is no part of the job."""
    return f"def plan(self, *a):\n    return replace(super().plan(*a), notes=({expression},))\n"


def through(line: str, what: str = "") -> str:
    """Return a body that starts the programs of `shell` through a line of bash, in which "$@" is the program."""
    return (
        "def shell(self, handle, node, words, *, stdin, terminal):\n"
        "    program = super().shell(handle, node, words, stdin=stdin, terminal=terminal)\n"
        f"    if {what!r} not in ('', words[2]): return program\n"
        f"    return Shell(('bash', '-o', 'pipefail', '-c', {line!r}, 'bash', *program.argv))\n"
    )


def command_as(expression: str) -> str:
    """Return a body that makes another command of `command`, the list of what `exec` was given."""
    return (
        "def shell(self, handle, node, words, *, stdin, terminal):\n"
        "    words, command = list(words[:7]), list(words[7:])\n"
        f"    words += {expression} if words[2] == 'exec' else command\n"
        "    return super().shell(handle, node, words, stdin=stdin, terminal=terminal)\n"
    )


FINAL = "status.state.final"
LOST = "state=State.LOST"

MUTANTS = {
    # -- forget
    "cancel is ignored while QUEUED or STARTING": Mutant(
        "forget",
        "def cancel(self, handle):\n    if self.status(handle).state is State.RUNNING: super().cancel(handle)\n",
    ),
    "cancel is ignored while RUNNING": Mutant(
        "forget",
        "def cancel(self, handle):\n    if self.status(handle).state is not State.RUNNING: super().cancel(handle)\n",
    ),
    "cancel reports and stops nothing": Mutant(
        "forget",
        "def cancel(self, handle):\n    (Path(handle) / 'gone').touch()\n"
        + status_as("state=State.CANCELLED", f"not {FINAL} and (Path(handle) / 'gone').exists()"),
    ),
    "cancel kills, and no rank can leave": Mutant(
        "forget",
        "def cancel(self, handle):\n"
        "    if not self.status(handle).state.final: supervisor.kill_leftovers(Path(handle))\n"
        "    super().cancel(handle)\n",
    ),
    "following ends at once": Mutant(
        "forget",
        "def logs(self, handle, *, follow=False, after=None):\n    return super().logs(handle, after=after)\n",
    ),
    "following never ends": Mutant(
        "forget",
        "def logs(self, handle, *, follow=False, after=None):\n"
        "    yield from super().logs(handle, follow=follow, after=after)\n"
        "    while follow: time.sleep(0.1)\n",
    ),
    "setup is not run": Mutant("forget", job_as("'setup': ''")),
    "find knows nothing": Mutant("forget", "def find(self, attempt_id): return None\n"),
    "fetch ignores what": Mutant(
        "forget", "def fetch(self, handle, into, what=FETCHABLE):\n    return super().fetch(handle, into)\n"
    ),
    "options are not checked": Mutant(
        "forget",
        "@classmethod\n"
        "def options(cls):\n"
        "    from pydantic import create_model\n"
        "    return create_model('Options', folder=(str, ''))\n",
    ),
    "exec passes no input": Mutant("forget", through('"$@" </dev/null')),
    "prints while it works": Mutant(
        "forget", "def find(self, attempt_id):\n    print('looking')\n    return super().find(attempt_id)\n"
    ),
    # -- report
    "stopped is success": Mutant("report", status_as("state=State.SUCCEEDED", "status.state is State.CANCELLED")),
    "stopped is failure": Mutant("report", status_as("state=State.FAILED", "status.state is State.CANCELLED")),
    "every failure has code 1": Mutant("report", status_as("exit_code=1", "status.exit_code")),
    "a code of 128 and more is cut": Mutant(
        "report", status_as("exit_code=status.exit_code & 127", "(status.exit_code or 0) > 127")
    ),
    "code 75 is PREEMPTED": Mutant("report", status_as("state=State.PREEMPTED", "status.exit_code == 75")),
    "exec succeeds always": Mutant("report", through('"$@"; true')),
    "exec fails with code 1": Mutant("report", through('"$@" || exit 1')),
    "exec mixes errors into the output": Mutant("report", through('"$@" 2>&1')),
    "never RUNNING": Mutant("report", status_as("state=State.STARTING", "status.state is State.RUNNING")),
    "unknown is QUEUED": Mutant("report", status_as("state=State.QUEUED", "status.state is State.LOST")),
    "no end time": Mutant("report", status_as("ended_at=None", FINAL)),
    "the end is always now": Mutant(
        "report", status_as("ended_at=datetime.now(UTC).isoformat().replace('+00:00', 'Z')", FINAL)
    ),
    "one status for all": Mutant(
        "report",
        "def statuses(self, handles):\n    return {handle: self.status(handles[0]) for handle in handles}\n",
    ),
    # -- decay
    "LOST when asked the tenth time": Mutant(
        "decay",
        "asked = 0\n"
        "def status(self, handle):\n"
        "    status = super().status(handle)\n"
        "    if status.state.final: self.asked += 1\n"
        "    return replace(status, state=State.LOST) if self.asked > 9 else status\n",
    ),
    "LOST a second after its end": Mutant(
        "decay",
        status_as(
            LOST,
            f"{FINAL} and (datetime.now(UTC) - datetime.fromisoformat(status.ended_at)).total_seconds() > 1",
        ),
    ),
    "LOST after its files were fetched": Mutant(
        "decay",
        "def fetch(self, handle, *a):\n    (Path(handle) / 'fetched').touch()\n    return super().fetch(handle, *a)\n"
        + status_as(LOST, "(Path(handle) / 'fetched').exists()"),
    ),
    "cancel rewrites history": Mutant(
        "decay",
        "def cancel(self, handle):\n    super().cancel(handle); (Path(handle) / 'gone').touch()\n"
        + status_as("state=State.CANCELLED", "(Path(handle) / 'gone').exists()"),
    ),
    "fetch moves the files": Mutant(
        "decay",
        "def fetch(self, handle, into, what=FETCHABLE):\n"
        "    super().fetch(handle, into, what)\n"
        "    for name in what: shutil.rmtree(Path(handle).parent / name, ignore_errors=True)\n"
        "    return into\n",
    ),
    "the log is gone after the end was read": Mutant(
        "decay",
        "def logs(self, handle, *, follow=False, after=None):\n"
        "    yield from super().logs(handle, follow=follow, after=after)\n"
        "    if self.status(handle).state.final: (Path(handle) / 'log').unlink(missing_ok=True)\n",
    ),
    # -- leak
    "the secret in the launcher's command line": Mutant("leak", leak("argv.append(secret)")),
    "the secret in the launcher's environment": Mutant("leak", leak("env['TOKEN'] = secret")),
    "the secret in a helper's environment": Mutant(
        "leak", leak("subprocess.Popen(['sleep', '5'], env={'TOKEN': secret})")
    ),
    "the secret in a file of the node": Mutant("leak", leak("(node / 'secret').write_text(secret)")),
    "the secret in a file of the run": Mutant("leak", leak("(node.parent / 'secret').write_text(secret)")),
    "the secret in a hidden file, in base64": Mutant(
        "leak", leak("(node / '.env').write_bytes(base64.b64encode(b'TOKEN=' + secret.encode()))")
    ),
    "the secret in a file, as JSON": Mutant("leak", leak("(node / 'given.json').write_text(json.dumps(given))")),
    "the secret in an archive": Mutant("leak", leak("(node / 'given.gz').write_bytes(gzip.compress(secret.encode()))")),
    "the secret in a file's name": Mutant("leak", leak("(node / secret).touch()")),
    "the secret in the plan": Mutant("leak", noted("os.environ.get('CONTRACT_SECRET', '')")),
    "the secret in the log": Mutant("leak", text_as("text.replace('***', os.environ.get('CONTRACT_SECRET', '***'))")),
    # -- lose
    "the first line is lost": Mutant("lose", lines_as("lines if after else lines[1:]")),
    "the last line is lost": Mutant("lose", lines_as("lines[:-1]")),
    "the last lines are lost after a cancel": Mutant(
        "lose", lines_as("lines[:-20] if self.status(handle).state is State.CANCELLED else lines")
    ),
    "empty lines are lost": Mutant("lose", lines_as("[line for line in lines if line.text]")),
    "lines of other ranks are lost": Mutant("lose", lines_as("[line for line in lines if line.rank < 1]")),
    "long lines are cut": Mutant("lose", text_as("text[:4096]")),
    "hidden files are lost": Mutant("lose", without_files("'/.' in str(path)")),
    "empty files are lost": Mutant("lose", without_files("path.stat().st_size == 0")),
    "files over 4 KiB are lost": Mutant("lose", without_files("path.stat().st_size > 4096")),
    "deep files are lost": Mutant("lose", without_files("len(path.relative_to(into).parts) > 4")),
    "files are cut at 64 KiB": Mutant(
        "lose",
        "def fetch(self, handle, into, what=FETCHABLE):\n"
        "    super().fetch(handle, into, what)\n"
        "    for path in [path for path in into.rglob('*') if path.is_file()]:\n"
        "        path.write_bytes(path.read_bytes()[:65536])\n"
        "    return into\n",
    ),
    "a folder that is there is not fetched again": Mutant(
        "lose",
        "def fetch(self, handle, into, what=FETCHABLE):\n"
        "    return super().fetch(handle, into, tuple(name for name in what if not (into / name).exists()))\n",
    ),
    "a failed attempt has no files": Mutant(
        "lose",
        "def fetch(self, handle, into, what=FETCHABLE):\n"
        "    ended_well = self.status(handle).state is State.SUCCEEDED\n"
        "    return super().fetch(handle, into, what if ended_well else ())\n",
    ),
    "exec closes the input early": Mutant("lose", through('head -c 4096 | "$@"')),
    "exec loses NUL in the input": Mutant("lose", through("tr -d '\\0' | \"$@\"")),
    "exec loses NUL in the output": Mutant("lose", through("\"$@\" | tr -d '\\0'")),
    "exec loses empty arguments": Mutant("lose", command_as("[word for word in command if word]")),
    "stack loses all ranks but the first": Mutant("lose", through('"$@" | head -1', "stack")),
    "checkpoints belong to the attempt": Mutant(
        "lose",
        "def plan(self, *a):\n"
        "    plan = super().plan(*a)\n"
        "    env = {**plan.request['env'], 'CLOUDTRAIN_RUN_DIR': plan.request['folder']}\n"
        "    return replace(plan, request={**plan.request, 'env': env})\n"
        "def fetch(self, handle, into, what=FETCHABLE):\n"
        "    return super().fetch(handle + '/any', into, what)\n",
    ),
    # -- repeat
    "the cursor is ignored": Mutant(
        "repeat",
        "def logs(self, handle, *, follow=False, after=None):\n    return super().logs(handle, follow=follow)\n",
    ),
    "the cursor is ignored while following": Mutant(
        "repeat",
        "def logs(self, handle, *, follow=False, after=None):\n"
        "    return super().logs(handle, follow=follow, after=None if follow else after)\n",
    ),
    "the line of the cursor comes again": Mutant(
        "repeat",
        "def logs(self, handle, *, follow=False, after=None):\n"
        "    last = [line for line in super().logs(handle) if line.cursor == after]\n"
        "    yield from (*last, *super().logs(handle, follow=follow, after=after))\n",
    ),
    "the last line comes twice": Mutant("repeat", lines_as("lines + lines[-1:]")),
    "every line has the same number": Mutant("repeat", lines_as("(line._replace(seq=0) for line in lines)")),
    "a second submit starts again": Mutant(
        "repeat",
        "def submit(self, plan, bundle):\n"
        "    shutil.rmtree(plan.request['folder'], ignore_errors=True)\n"
        "    return super().submit(plan, bundle)\n",
    ),
    "a second submit has another handle": Mutant(
        "repeat",
        "def submit(self, plan, bundle):\n"
        "    again = self.find(plan.attempt_id)\n"
        "    return super().submit(plan, bundle) + ('/.' if again else '')\n",
    ),
    # -- alter
    "arguments are split": Mutant("alter", job_as("'args': ' '.join(job.args).split()")),
    "arguments are stripped": Mutant("alter", job_as("'args': [word.strip() for word in job.args]")),
    "hyperparameters become numbers": Mutant("alter", job_as("'hyperparameters': numbers(job.hyperparameters)")),
    "hyperparameters are sorted": Mutant(
        "alter", job_as("'hyperparameters': dict(sorted(job.hyperparameters.items()))")
    ),
    "variables are stripped": Mutant("alter", job_as("'env': {name: text.strip() for name, text in job.env.items()}")),
    "variables are expanded": Mutant(
        "alter", job_as("'env': {name: os.path.expandvars(text) for name, text in job.env.items()}")
    ),
    "exec joins arguments in a shell": Mutant("alter", command_as("['sh', '-c', ' '.join(command)]")),
    "exec expands arguments": Mutant("alter", command_as("[os.path.expandvars(word) for word in command]")),
    "exec ends lines as a terminal": Mutant("alter", through("\"$@\" | sed 's/$/\\r/'")),
    "lines are stripped": Mutant("alter", text_as("text.strip()")),
    "lines are ASCII": Mutant("alter", text_as("text.encode('ascii', 'replace').decode()")),
    # -- widen
    "find takes the beginning of an id": Mutant(
        "widen",
        "def find(self, attempt_id):\n"
        "    found = [node for node in self.attic.glob('*/a*') if f'{node.parent.name}-{node.name}'.startswith(attempt_id)]\n"
        "    return str(found[0]) if found else None\n",
    ),
    "find takes any attempt of the run": Mutant(
        "widen",
        "def find(self, attempt_id):\n"
        "    found = list((self.attic / attempt_id.rpartition('-a')[0]).glob('a*'))\n"
        "    return str(found[0]) if found else None\n",
    ),
    "find takes an attempt that was only prepared": Mutant(
        "widen",
        "def plan(self, *a):\n"
        "    plan = super().plan(*a)\n"
        "    Path(plan.request['folder']).mkdir(parents=True, exist_ok=True)\n"
        "    return plan\n"
        "def find(self, attempt_id):\n"
        "    run_id, _, number = attempt_id.rpartition('-a')\n"
        "    node = self.attic / run_id / f'a{number}'\n"
        "    return str(node) if node.exists() else None\n",
    ),
    "an unknown handle is its neighbour": Mutant(
        "widen",
        "def status(self, handle):\n"
        "    found = [handle, *map(str, Path(handle).parent.glob('a*'))]\n"
        "    return super().status(next(node for node in found if Path(node).exists() or node == found[-1]))\n",
    ),
    "exec takes any node for the first": Mutant(
        "widen",
        "def shell(self, handle, node, words, *, stdin, terminal):\n"
        "    words = [*words[:4], '0', *words[5:]]\n"
        "    return super().shell(handle, 0, words, stdin=stdin, terminal=terminal)\n",
    ),
    "exec runs after the end too": Mutant(
        "widen",
        "def shell(self, handle, node, words, *, stdin, terminal):\n"
        "    ended = self.status(handle).state.final and words[2] == 'exec'\n"
        "    if ended: return Shell(tuple(words[7:]))\n"
        "    return super().shell(handle, node, words, stdin=stdin, terminal=terminal)\n",
    ),
    "exec runs beside no rank": Mutant(
        "widen",
        "def shell(self, handle, node, words, *, stdin, terminal):\n"
        "    if words[2] == 'exec': return Shell(tuple(words[7:]))\n"
        "    return super().shell(handle, node, words, stdin=stdin, terminal=terminal)\n",
    ),
    # -- depend
    "attempts in memory": Mutant(
        "depend",
        "def __init__(self, *a):\n    super().__init__(*a); self.mine = set()\n"
        "def submit(self, plan, bundle):\n"
        "    handle = super().submit(plan, bundle); self.mine.add(handle); return handle\n"
        "def status(self, handle):\n"
        "    return super().status(handle) if handle in self.mine else Status(State.LOST, reason='unknown')\n",
    ),
    "attempts in the memory of the process": Mutant(
        "depend",
        "mine = set()\n"
        "def submit(self, plan, bundle):\n"
        "    handle = super().submit(plan, bundle); self.mine.add(handle); return handle\n"
        "def status(self, handle):\n"
        "    return super().status(handle) if handle in self.mine else Status(State.LOST, reason='unknown')\n",
    ),
    "a handle below the working directory": Mutant(
        "depend", "def submit(self, *a): return os.path.relpath(super().submit(*a))\n"
    ),
    "LOST a day later": Mutant(
        "depend",
        status_as(LOST, f"{FINAL} and time.time() - datetime.fromisoformat(status.ended_at).timestamp() > 80000"),
    ),
    "an attempt of the future is not found": Mutant(
        "depend",
        "def find(self, attempt_id):\n"
        "    handle = super().find(attempt_id)\n"
        "    return handle if handle and os.stat(handle).st_mtime < time.time() + 60 else None\n",
    ),
    "times of the local zone": Mutant(
        "depend",
        status_as("ended_at=datetime.fromisoformat(status.ended_at).astimezone().isoformat()", "status.ended_at"),
    ),
    "what others may write is not found": Mutant(
        "depend",
        "def find(self, attempt_id):\n"
        "    handle = super().find(attempt_id)\n"
        "    return None if handle and os.stat(handle).st_mode & 0o002 else handle\n",
    ),
    "messages of the locale": Mutant(
        "depend",
        "def status(self, handle):\n"
        "    status = super().status(handle)\n"
        "    return replace(status, reason='bitti') if os.environ.get('LANG', '').startswith('tr') else status\n",
    ),
    "the clock in the plan": Mutant("depend", noted("datetime.now().isoformat(timespec='seconds')")),
    "chance in the plan": Mutant("depend", noted("uuid.uuid4().hex")),
    "the working directory in the plan": Mutant("depend", noted("os.getcwd()")),
    "the locale in the plan": Mutant("depend", noted("os.environ.get('LC_ALL', '')")),
    "a new folder for every object": Mutant(
        "depend",
        "count = iter(range(100000))\n"
        "def __init__(self, options, workdir):\n"
        "    super().__init__({'folder': f\"{options['folder']}/{next(self.count)}\"}, workdir)\n",
    ),
}

KINDS = ("nothing", "twice", "another")
CALLS = {  # of the interface, with the kinds of fault that are made
    **dict.fromkeys(("plan", "find", "status", "logs", "cancel", "fetch", "labels", "remains"), KINDS),
    "submit": KINDS[:2],
    "shell": KINDS[:1],
    "options": KINDS[:1],
    "discard": KINDS[2:],
    "remove": ("nothing", "another"),
}
NOTHING = {  # what the base class answers, or for calls that it does not have
    "logs": "iter(())",
    "fetch": "a[0]",
    "options": "create_model('Options')",
    **dict.fromkeys(("plan", "submit", "find", "status", "cancel"), "None"),
}
OTHER = (  # of an attempt's handle or id: that of the one that was submitted last, and is not it
    "def submit(self, plan, bundle):\n"
    "    handle = super().submit(plan, bundle)\n"
    "    type(self).known = [*(pair for pair in self.known if pair[0] != handle), (handle, plan.attempt_id)]\n"
    "    return handle\n"
    "known = []\n"
    "def other(self, which):\n"
    "    found = [pair['-a' in which.rpartition('/')[2]] for pair in self.known if which not in pair]\n"
    "    return found[-1] if found else which\n"
)


def of_call(name: str) -> Iterator[tuple[str, Mutant]]:
    """Yield the mutants of a call."""
    head = f"def {name}(self, *a, **k):\n" if name != "options" else "@classmethod\ndef options(cls, *a, **k):\n"
    twice = f"    super().{name}(*a, **k)\n    return super().{name}(*a, **k)\n"
    if name == "logs":
        twice = "    yield from super().logs(*a, **k)\n    yield from super().logs(*a, **k)\n"
    another = f"    return super().{name}(self.other(a[0]), *a[1:], **k)\n"
    if name == "plan":
        another = "    return super().plan(*a[:3], a[3] + 1)\n"
    made = {
        "nothing": (
            f"{name} does nothing",
            f"{head}    return {NOTHING.get(name, f'Backend.{name}(self, *a, **k)')}\n",
        ),
        "twice": (f"{name} is done twice", head + twice),
        "another": (f"{name} of another attempt", (OTHER if name != "plan" else "") + head + another),
    }
    for kind in CALLS[name]:
        yield made[kind][0], Mutant(kind, made[kind][1])


MUTANTS |= dict(pair for name in CALLS for pair in of_call(name))

SURVIVORS = {
    "prints while it works": "a simulated platform in the same process may print, so the suite does not look at the output",
    "submit is done twice": "a second call with the same plan is the same attempt",
    "cancel is done twice": "it may be asked for twice",
    "fetch is done twice": "the second one copies nothing that is there",
    **{f"{name} is done twice": "it only asks" for name in ("plan", "find", "status", "labels", "remains")},
}

HEAD = """\
import base64, gzip, json, os, shutil, subprocess, time, uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import create_model

from cloudtrain.backends import registry
from cloudtrain.backends.api import FETCHABLE, Backend, Shell
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.events import State, Status
from cloudtrain.nodes import directory, supervisor
from cloudtrain.testing.contract import BackendContract
from tests.testing.reference import Reference


def numbers(texts):
    def number(text):
        try:
            return str(float(text))
        except ValueError:
            return text
    return {name: number(text) for name, text in texts.items()}


class Mutant(Reference):
"""
TAIL = """

registry.BUILT_IN["attic"] = ("mutant_contract:Mutant", None)


class TestMutant(BackendContract):
    @pytest.fixture
    def connect(self, tmp_path):
        return lambda: Mutant({"folder": str(tmp_path / "attic")}, tmp_path)
"""


def suite(body: str, operator: str = "") -> str:
    """Return the text of a test file that runs the contract suite against a class."""
    text = HEAD + "".join(f"    {line}\n" for line in body.splitlines()) + TAIL
    if operator in KINDS:
        text = text.replace("Mutant(Reference)", "Mutant(LocalBackend)").replace('"attic"]', '"local"]')
        text = text.replace('{"folder": str(tmp_path / "attic")}', "{}")
    return text
