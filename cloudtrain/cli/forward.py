"""cloudtrain forward: reach a port of a node here, on the loopback address."""

from __future__ import annotations

import sys

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BadRequest


@options.command()
@options.run_named
@options.argument(
    "ports",
    "PORT[:LOCAL]",
    "The port on the node, and the port on this computer. Default of LOCAL: the same number; 0 takes a free port.",
)
@click.option("--node", type=click.IntRange(0), help="The node; default: that of --rank, or 0.")
@click.option("--rank", type=click.IntRange(0), help="Use the node of this rank.")
@options.role_option
@options.json_option
def command(run_id: str, ports: str, node: int | None, rank: int | None, role: str | None, as_json: bool) -> int:
    """Forward a port of a node to this computer, as for TensorBoard.

    Ctrl-C ends the forwarding only, and the run continues. The server on the node must listen on 127.0.0.1 or on
    all addresses. On this computer the port is open on 127.0.0.1 only, which other users of this computer can reach
    too.

    \b
    cloudtrain forward tiny-lm-261125 6006
    cloudtrain forward tiny-lm-261125 8888:0 --node 1
    """
    from cloudtrain.runs.inside import LOOPBACK, Forward, Inside, describe

    port, local = _parse_ports(ports)
    inside = Inside.of(runs.find(run_id))
    place = inside.node_of(node, rank, role)
    program = inside.connection(place, port)
    if not program.argv and program.stream is None:
        raise BadRequest(
            f"{inside.run.run_id} runs on {inside.backend.name}, where cloudtrain cannot forward ports",
            describe(program),
        )

    def complain(why: str) -> None:
        terminal.note(f"node {place}: {why}")

    forward = Forward(lambda: inside.connection(place, port), complain, local)
    try:
        inside.record("forward", port=port, on=place)
        address = f"{LOOPBACK}:{forward.port}"
        if as_json:
            terminal.print_json({"run_id": inside.run.run_id, "node": place, "port": port, "address": address})
        else:
            terminal.print_lines(f"http://{address}  is port {port} of node {place}; Ctrl-C ends it")
        sys.stdout.flush()
        forward.serve()
    except KeyboardInterrupt:
        pass  # how it ends
    finally:
        forward.close()
    return 0


def _parse_ports(text: str) -> tuple[int, int]:
    """Return the port of the node and the one here."""
    there, _, here = text.partition(":")
    numbers = [int(word) if word.isascii() and word.isdigit() else -1 for word in (there, here or there)]
    if not 0 < numbers[0] < 1 << 16 or not 0 <= numbers[1] < 1 << 16:
        raise BadRequest(f"{text!r} is not a port", "write PORT or PORT:LOCAL, as in 6006 or 8888:0")
    return numbers[0], numbers[1]
