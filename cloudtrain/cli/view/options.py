"""Arguments and options shared by the commands, with their shell completion."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from cloudtrain.clock import SYSTEM
from cloudtrain.job import providers

WORDS = "cloudtrain.words"  # of a context: what follows the command's name
F = TypeVar("F", bound=Callable[..., Any])


class JobWords(NamedTuple):
    """What a command line says of a job."""

    job: str | None = None
    args: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    gpus: str | None = None
    nodes: str | None = None
    processes: str | None = None
    module: str | None = None
    name: str | None = None
    env: tuple[str, ...] = ()
    ray: bool = False


class Argument(click.Argument):
    """An argument with a description for the help; click's own `help` of arguments is too new for the oldest click we take."""

    def __init__(self, *args: Any, description: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.description = description


def argument(name: str, metavar: str, description: str, **settings: Any) -> Callable[[F], F]:
    """Return an argument whose description stands in the help of its command; brackets in `metavar` make it optional."""
    settings = {"required": not metavar.startswith("["), **settings}
    return click.argument(name, metavar=metavar, cls=Argument, description=description, **settings)


class Command(click.Command):
    """A click command with a help of one screen and `--help-all`, that also accepts `--debug` after its name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, hidden=True, expose_value=False))
        self.params.append(
            click.Option(
                ["--help-all"], is_flag=True, is_eager=True, hidden=True, expose_value=False, callback=_print_all
            )
        )

    def get_help(self, ctx: click.Context) -> str:
        """Return what the command does, its examples, and the beginning of what stands on each argument and option."""
        from inspect import cleandoc

        summary, *rest = cleandoc(self.help or "").split("\n\n")
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        with formatter.indentation():
            for text in (summary, *(text for text in rest if text.startswith("\b"))):
                formatter.write_paragraph()
                formatter.write_text(text)
        rows = [(str(each.metavar), _begin(each.description)) for each in self.params if isinstance(each, Argument)]
        records = [(each, each.get_help_record(ctx)) for each in self.get_params(ctx)]
        rows += [(row[0], _begin(each.help)) for each, row in records if row and isinstance(each, click.Option)]
        with formatter.section("Options"):
            formatter.write_dl([*rows, ("--help-all", "Explain all of this in full.")], col_max=24)
        return formatter.getvalue()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep what follows `--` for the script: click would take its first word for JOB."""
        ctx.meta[WORDS] = [*args]
        if not any(param.name == "args" for param in self.params) or "--" not in args:
            return super().parse_args(ctx, args)
        at = args.index("--")
        rest = super().parse_args(ctx, args[:at])
        ctx.params["args"] = (*ctx.params["args"], *args[at + 1 :])
        return rest

    def make_parser(self, ctx: click.Context) -> click.parser._OptionParser:
        """Return a parser that notes an option which has one value and is given more than once: click takes the last."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            found = parse(args)
            for param in dict.fromkeys(found[2]):
                one = isinstance(param, click.Option) and not (param.multiple or param.count or param.is_flag)
                if one and found[2].count(param) > 1:
                    click.echo(
                        f"note: {max(param.opts, key=len)} is given more than once; the last one counts", err=True
                    )
            return found

        parser.parse_args = parse_args  # type: ignore[method-assign]
        return parser

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments above the options."""
        rows = [(str(each.metavar), each.description) for each in self.params if isinstance(each, Argument)]
        if rows:
            with formatter.section("Arguments"):
                formatter.write_dl(rows)
        super().format_options(ctx, formatter)


def _begin(text: str | None) -> str:
    """Return the first statement of a description."""
    return (text or "").partition(". ")[0].partition("; ")[0].rstrip(".") + "."


def _print_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(click.Command.get_help(ctx.command, ctx))
        ctx.exit()


def command(**settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Turn a function that returns an exit code into a click command."""
    return click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], **settings})


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a run id; nothing when the history cannot be read."""
    from cloudtrain.errors import CloudtrainError
    from cloudtrain.history.store import Store
    from cloudtrain.job import targets

    try:
        return [CompletionItem(name) for name in Store(targets.home()).names() if name.startswith(incomplete)]
    except (CloudtrainError, OSError):
        return []


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a backend or a target of cloudtrain.toml."""
    from cloudtrain.backends import registry
    from cloudtrain.errors import CloudtrainError
    from cloudtrain.job import targets

    try:
        names = {*registry.names(), *targets.named_targets()}
    except (CloudtrainError, OSError):
        names = set(registry.names())
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


class _Seconds(click.ParamType[float]):
    """A time in seconds, or with a unit as in the job file: 90, 30m, 2h."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from cloudtrain.job.units import duration_s

        try:
            seconds = float(value) if str(value).replace(".", "", 1).isdecimal() else float(duration_s(str(value)))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        return seconds


SECONDS = _Seconds()


class _Rank(click.ParamType[int | None]):
    """A rank, or all of them: None."""

    name = "rank"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "all":
            return None
        if not str(value).isdecimal() or int(value) >= 1 << 31:
            self.fail(f"{value!r} is not a rank number or all", param, ctx)
        return int(value)


_ID = "as `cloudtrain ls` prints it, or its id. The first characters of an id are enough if no other begins with them."
RUN = f"The run, {_ID}"
RUNS = f"One or more runs, each {_ID}"
NEWEST = "Default: the newest run."
# RUN of a command that only reads; without it the newest run is shown
run_or_newest = argument("run_id", "[RUN]", f"{RUN} {NEWEST}", shell_complete=complete_runs)
run_named = argument("run_id", "RUN", RUN, shell_complete=complete_runs)
rank_option = click.option(
    "--rank",
    type=_Rank(),
    default="0",
    metavar="RANK",
    help="Metrics of this rank, or `all` for a curve of each rank. Default: rank 0, or the lowest rank that logged the metric.",
)
verbose_option = click.option(
    "--verbose",
    is_flag=True,
    help="Also print what is hidden or shortened by default; default settings, launcher variables, whole requests, all "
    "notes, and the launcher's manifest (its instructions: arguments, env, inputs, limits and names of secrets).",
)


def json_option_with(help: str) -> Callable[[F], F]:
    """Return the option --json with the help of a command whose output a script reads."""
    return click.option("--json", "as_json", is_flag=True, help=help)


json_option = json_option_with("Print JSON.")
json_of_start = json_option_with(
    "Print JSON, an object with run_id and state. With --wait it is printed at the end of the run, with -f at both, and an "
    "object for each log line between them."
)


def target_option_with(help: str) -> Callable[[F], F]:
    """Return the option --target with the help of a command that uses it in its own way."""
    return click.option("-t", "--target", metavar="TARGET", shell_complete=complete_targets, help=help)


WHERE = f"Where to run: {providers.WHERE}."
OWN_TARGET = f"The default is the job's own target; without one it is {providers.DEFAULT_TARGET}."
target_option = target_option_with(f"{WHERE} {OWN_TARGET}")


def sets_option_with(help: str) -> Callable[[F], F]:
    """Return the option --set with the help of a command that uses it in its own way."""
    return click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help=help)


sets_option = sets_option_with(
    "Set a value of the job, as in --set num_nodes=2; may be repeated. The last value of a key counts."
)


JOB = "A job file (.yaml, .json), or a script (.py, .sh)."
ARGS = (
    "Arguments of SCRIPT or of --module. Where no JOB, SCRIPT or --module is given: a program and its arguments, and no job "
    "file is read."
)
GPUS = "GPUs of each node, as in A100:8; short for --set resources.accelerators=..."


def _with_options(function: F, *options: Callable[[F], F]) -> F:
    """Return a function with options of click, the first one on top."""
    for add in reversed(options):
        function = add(function)
    return function


def job_options(function: F, gpus: str = GPUS, args: str = ARGS, target: str = f"{WHERE} {OWN_TARGET}") -> F:
    """Add the argument JOB and the options that override values of the job; `gpus`, `args` and `target` are texts of the help.

    All but --target reach the function as one argument, `words`, a view.jobs.JobWords.
    """

    @wraps(function)
    def gathered(*args: Any, **values: Any) -> Any:
        words = JobWords(**{name: values.pop(name) for name in JobWords._fields})
        return function(*args, words=words, **values)

    return _with_options(
        cast(F, gathered),
        argument("job", "[JOB|SCRIPT]", f"{JOB} Default: job.yaml or job.yml in this folder.", type=click.Path()),
        argument("args", "[-- ARGS...]", args, nargs=-1, type=click.UNPROCESSED),
        target_option_with(target),
        sets_option,
        lambda function: layout(function, gpus),
        click.option(
            "-m",
            "--module",
            metavar="MODULE",
            help="Run a module of the source, as python -m does; ARGS are its arguments, and no job file is read.",
        ),
        click.option("--ray", is_flag=True, help="Start a Ray cluster on the nodes; short for --set ray=true."),
        click.option("--name", metavar="NAME", help="Name of the job; short for --set name=NAME."),
        click.option(
            "-e",
            "--env",
            "env",
            metavar="NAME[=VALUE]",
            multiple=True,
            help="Environment variable of the job; without =VALUE, the value in your shell, as a secret where the name "
            "says so (HF_TOKEN). May be repeated.",
        ),
    )


def layout(function: F, gpus: str = GPUS) -> F:
    """Add --gpus, --nodes and --processes."""
    return _with_options(
        function,
        click.option("--gpus", metavar="TYPE:COUNT", help=gpus),
        click.option("--nodes", "--num-nodes", metavar="N", help="Number of nodes; short for --set num_nodes=N."),
        click.option(
            "--processes", "--nproc", metavar="N", help="Processes of each node; short for --set processes_per_node=N."
        ),
    )


role_option = click.option("--role", metavar="NAME", help="A role of the job; --rank counts within it.")
take_over_option = click.option(
    "--take-over",
    is_flag=True,
    help="Where the home here is a copy of another one: act on runs that the other one has submitted, too.",
)
force_option = click.option(
    "--force",
    is_flag=True,
    help="Take a job that probably does not fit on its GPUs. Without it, such a job of the shared trainer is refused "
    "(`cloudtrain fit`).",
)


class Ending(NamedTuple):
    """What a command that starts an attempt does until its end, as its options say."""

    follow: bool = False
    wait: bool = False
    on_interrupt: str = "detach"
    yes: bool = False
    as_json: bool = False


CODES = "`cloudtrain wait --help-all`"


def ending_options(function: F, of: str = "run") -> F:
    """Add --follow, --wait, --on-interrupt, --yes and --json, for commands that start an attempt.

    They reach the function as one argument, `ending`. `of` is what the help calls the run.
    """

    @wraps(function)
    def gathered(*args: Any, **values: Any) -> Any:
        ending = Ending(**{name: values.pop(name) for name in Ending._fields})
        if ending.follow and ending.wait:
            raise click.UsageError("--follow and --wait cannot be combined")
        return function(*args, ending=ending, **values)

    return _with_options(
        cast(F, gathered),
        click.option("-f", "--follow", is_flag=True, help=f"Follow the log; the exit code is the {of}'s ({CODES})."),
        click.option("--wait", is_flag=True, help=f"Wait until the {of} ends; the exit code is its own ({CODES})."),
        click.option(
            "--on-interrupt",
            type=click.Choice(["detach", "cancel"]),
            default="detach",
            show_default=True,
            help="What Ctrl-C does while following or waiting; stop following (detach), or cancel the run, which SIGTERM "
            "then does too. The exit code is 130.",
        ),
        click.option(
            "-y",
            "--yes",
            is_flag=True,
            help="Do not ask for confirmation. A run is confirmed that may cost more than confirm_above in cloudtrain.toml. "
            "Without a terminal, or with --json, such a run is refused without -y.",
        ),
        json_of_start,
    )


def parse_start(since: str | None, option: str) -> str:
    """Return a date, or a duration before now, as a time in UTC, "" for None; raises BadParameter that names the option."""
    import re
    from datetime import date

    from cloudtrain.job import units

    if since is None:
        return ""
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", since):
            return date.fromisoformat(since).isoformat()
        return units.format_time(SYSTEM.now() - units.duration_s(since))
    except ValueError:
        hint = "write a date such as 2026-11-01, or a duration such as 30d"
        raise click.BadParameter(f"{since!r}: {hint}", param_hint=option) from None
