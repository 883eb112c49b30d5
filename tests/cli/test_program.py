"""The table of commands: it says what they are without importing them."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

from cloudtrain import __version__
from cloudtrain.cli import COMMANDS, RARE, RENAMED, SECTIONS, main, program
from cloudtrain.cli.view import options
from tests.conftest import WAIT_S

DESIGN = ["init", "plan", "submit", "ls", "show", "logs", "metrics", "wait", "cancel", "fetch", "resume", "rerun"]
DESIGN += [
    "diff",
    "mark",
    "attach",
    "report",
    "console",
    "doctor",
    "fit",
    "eval",
    "prices",
    "costs",
    "rm",
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


def test_the_table_says_what_each_command_says():
    assert {name: (command(name).help or "").splitlines()[:1] for name in COMMANDS} == {
        name: [line] for name, line in COMMANDS.items()
    }
    options_of = {name: [each for each in command(name).params if isinstance(each, click.Option)] for name in COMMANDS}
    assert [(name, each.name) for name, of in options_of.items() for each in of if not (each.help or each.hidden)] == []


def test_the_help_describes_every_argument():
    groups = [(command(name), *getattr(command(name), "commands", {}).values()) for name in COMMANDS]
    assert [wrong for group in groups for each in group for wrong in badly_described(each)] == []


def badly_described(found: click.Command) -> list[tuple[str | None, str | None]]:
    """Return the arguments of a command that its help does not describe, or describes as it does not take them."""
    help_text = click.Command.get_help(found, click.Context(found, help_option_names=["-h", "--help"]))
    shown = help_text.partition("Arguments:")[2].partition("Options:")[0]
    return [
        (found.name, argument.name)
        for argument in found.params
        if isinstance(argument, click.Argument)
        and not (
            isinstance(argument, options.Argument)
            and argument.description
            and argument.metavar in shown
            and argument.metavar.startswith("[") is not argument.required
        )
    ]


def test_help_of_every_command(cli):
    shown = {(name, flag): cli(name, flag) for name in COMMANDS for flag in ("--help", "-h")}
    assert {
        (name, flag): each
        for (name, flag), each in shown.items()
        if each.code != 0
        or f"Usage: cloudtrain {name}" not in each.out
        or COMMANDS[name] not in " ".join(each.out.split())
    } == {}


def test_help_is_one_screen_and_help_all_has_the_rest(cli):
    groups = {name: getattr(command(name), "commands", {}) for name in COMMANDS}
    several = [(name, inner) for name, inside in groups.items() for inner in inside]
    shown = {words: cli(*words, "--help").out for words in [*((name,) for name in COMMANDS), *several]}
    assert {words: len(text.splitlines()) for words, text in shown.items() if len(text.splitlines()) > 40} == {}
    for words in [words for words in shown if not groups[words[0]] or len(words) > 1]:
        whole = cli(*words, "--help-all")
        assert whole.code == 0 and whole.out != shown[words] and "--help-all" in shown[words]
    assert "cloudtrain submit train.py -f" in shown["submit",]
    assert "A plan is sent" in cli("submit", "--help-all").out and "A plan is sent" not in shown["submit",]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_describes_24_commands_and_names_the_rare_ones(cli, words):
    shown = cli(*words)
    assert shown.code == 0
    described = {name: line for name, line in COMMANDS.items() if name not in RARE}
    for name, line in described.items():
        assert f"  {name.ljust(max(map(len, described)))}  {line}" in shown.out
    assert len(described) <= 24 and COMMANDS.keys() - described.keys() == set(RARE)
    named = " ".join(shown.out.partition("More commands")[2].split())
    assert ", ".join(RARE) in named


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_works_and_says_the_new_one(cli, old, new):
    shown = cli(old, "--help")
    assert shown.code == 0 and f"Usage: cloudtrain {new[0]}" in shown.out
    assert (
        shown.err
        == f"cloudtrain {old} is now `cloudtrain {' '.join(new)}`; the old name is removed in the next release\n"
    )


def test_every_reading_command_takes_json():
    for name in set(DESIGN) - {
        "exec",  # its output is the command's
        "init",
        "image",
        "sweep",
    }:  # which print no data or have commands of their own
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
