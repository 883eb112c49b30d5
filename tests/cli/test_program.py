"""The table of commands: it says what they are without importing them."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

from cloudtrain import __version__
from cloudtrain.cli import COMMANDS, SECTIONS, main, program
from cloudtrain.cli.view import options
from tests.conftest import WAIT_S

DESIGN = ["init", "plan", "submit", "ls", "show", "logs", "metrics", "wait", "cancel", "fetch", "resume", "rerun"]
DESIGN += [
    "diff",
    "mark",
    "watch",
    "attach",
    "report",
    "console",
    "doctor",
    "schema",
    "fit",
    "eval",
    "package",
    "prices",
    "costs",
    "rm",
    "prune",
    "permissions",
    "image",
    "audit",
    "exec",
    "stack",
    "forward",
    "top",
    "sweep",
]


def command(name: str) -> click.Command:
    found = program.get_command(click.Context(program), name)
    assert found is not None
    return found


def test_the_commands_are_those_of_the_design():
    assert sorted(COMMANDS) == sorted(DESIGN)
    assert sum(map(len, SECTIONS.values())) == len(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says(name):
    found = command(name)
    assert found.help is not None
    assert found.help.splitlines()[0] == COMMANDS[name]
    assert all(param.help for param in found.params if isinstance(param, click.Option) and not param.hidden), name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_describes_every_argument(name):
    found = command(name)
    for each in (found, *getattr(found, "commands", {}).values()):
        arguments = [param for param in each.params if isinstance(param, click.Argument)]
        shown = (
            each.get_help(click.Context(each, help_option_names=["-h", "--help"]))
            .partition("Arguments:")[2]
            .partition("Options:")[0]
        )
        for argument in arguments:
            assert isinstance(argument, options.Argument) and argument.description, (each.name, argument.name)
            assert argument.metavar in shown and (argument.metavar.startswith("[") is not argument.required), each.name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(cli, name):
    for flag in ("--help", "-h"):
        shown = cli(name, flag)
        assert shown.code == 0
        assert f"Usage: cloudtrain {name}" in shown.out
        assert COMMANDS[name] in " ".join(shown.out.split())


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(cli, words):
    shown = cli(*words)
    assert shown.code == 0
    for name, line in COMMANDS.items():
        assert f"  {name.ljust(max(map(len, COMMANDS)))}  {line}" in shown.out


def test_every_reading_command_takes_json():
    for name in set(DESIGN) - {
        "exec",  # its output is the command's
        "init",
        "schema",
        "image",
        "sweep",
    }:  # which print no data, nothing but JSON, or have commands of their own
        assert "--json" in [flag for param in command(name).params for flag in param.opts], name


def test_version(cli):
    assert cli("--version").out == f"cloudtrain {__version__}\n"


@pytest.mark.parametrize("module", ["cloudtrain", "cloudtrain.cli"])
def test_the_package_is_a_program_too(module):
    done = subprocess.run([sys.executable, "-m", module, "nope"], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2 and "there is no command" in done.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("sumbit", "submit?"), ("log", "logs?"), ("cancle", "cancel?"), ("train.py", "submit train.py?")],
)
def test_a_mistyped_command_is_answered_with_the_nearest(cli, typed, meant):
    shown = cli(typed)
    assert shown.code == 2
    assert f"there is no command '{typed}'; did you mean {meant}" in shown.err


def test_main_returns_and_never_raises():
    assert main(["no-such-command"]) == 2


def test_completion_knows_commands_runs_and_targets(shell, project, tmp_path):
    (project / "cloudtrain.toml").write_text('[targets.local-two]\nbackend = "local"\n')
    run_id = shell("submit", "train.py", "--json").json["run_id"]

    def complete(*words: str) -> list[str]:
        env = os.environ | {
            "_CLOUDTRAIN_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["cloudtrain", *words]),
            "COMP_CWORD": str(len(words)),
        }
        return [line.partition(",")[2] for line in shell(env=env).out.splitlines() if line]

    assert complete("su") == ["submit"]
    assert complete("show", run_id[:6]) == [run_id]
    assert complete("show", "zzz") == []
    assert complete("submit", "-t", "loc") == ["local", "local-two"]
    assert shell("wait", run_id).code == 0


def test_completion_survives_a_history_that_cannot_be_used(shell, home):
    home.mkdir()
    (home / "history.sqlite3").mkdir()
    env = os.environ | {"_CLOUDTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "cloudtrain show x", "COMP_CWORD": "2"}
    shown = shell(env=env)
    assert (shown.out.strip(), shown.err) == ("", "")
