"""cloudtrain console: show the runs in the browser."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain.cli.view import options, terminal
from cloudtrain.errors import BadRequest, install_command


@options.command()
@click.option(
    "--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 chooses a free port."
)
@click.option("--open/--no-open", "open_browser", default=True, help="Open the browser, if there is one.")
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    help="History to show; default: that of CLOUDTRAIN_HOME.",
)
@options.json_option
def command(port: int, open_browser: bool, home: Path | None, as_json: bool) -> int:
    """Show runs in the browser, until Ctrl-C.

    There you can also submit, cancel, resume and rerun runs, and change sweeps. Ctrl-C ends the console, and runs continue.

    It listens on this computer only. The address that it prints has a secret token: without the token nothing is shown.

    To see it from another computer, run `ssh -L 8080:127.0.0.1:PORT HOST` there, with the printed port and this computer's
    name. Then open the printed address there, with port 8080 in place of the printed port. The command needs NiceGUI, which
    the extra cloudtrain[console] installs.

    \b
    cloudtrain console
    cloudtrain console --port 8080 --no-open
    """
    from importlib.util import find_spec

    from cloudtrain.job import targets

    missing = [name for name in ("nicegui", "plotly") if find_spec(name) is None]
    if missing:
        raise BadRequest(
            f"the console needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed",
            _INSTALL_COMMAND,
        )
    from contextlib import ExitStack

    from cloudtrain.console import server

    history_home = (home or targets.home()).absolute()
    with ExitStack() as open_pages:

        def started(address: str) -> None:
            if as_json:
                terminal.print_json({"url": address})
            else:
                terminal.print_lines(f"the console is at {address}", "Ctrl-C stops the console; runs continue")
            _flush()
            if open_browser:
                open_pages.enter_context(server.open_in_browser(address, history_home))

        server.serve(history_home, port, started)
    return 0


_INSTALL_COMMAND = install_command("cloudtrain[console]")


def _flush() -> None:
    import sys

    sys.stdout.flush()
