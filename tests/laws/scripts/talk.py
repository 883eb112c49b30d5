"""What a node says in the test of law 9: pieces of output, and the lines that they must become. Also a script."""

import os
import random
import sys


def said(node, count):
    """Yield (bytes, lines that they end) until so many lines are said; the very last has no newline."""
    choose = random.Random(node)
    n = 0
    while n < count:
        kind = choose.randrange(40)
        mark = f"{node}.{n}"
        if n == count - 1:
            raw = f"{mark} the end, without a newline".encode()
            lines = [raw]
        elif kind == 0 and n < count - 30:  # a progress bar
            lines = [
                f"{mark} {percent}%|{'#' * percent}".encode() for percent in range(0, 100, choose.randrange(7, 50))
            ]
            raw = b"\r".join(lines) + b"\r\n"
        elif kind == 1:
            lines = [f"{mark} by Windows".encode()]
            raw = lines[0] + b"\r\n"
        elif kind == 2:  # no text at all
            junk = bytes(choose.choice(JUNK) for _ in range(choose.randrange(1, 60)))
            lines = [mark.encode() + b" " + junk]
            raw = lines[0] + b"\n"
        elif kind == 3:
            lines, raw = [b""], b"\n"
        elif kind == 4:
            lines = [f"{mark} ünï 漢字 🚀 \u2028\x85 ".encode()]
            raw = lines[0] + b"\n"
        else:
            lines = [f"{mark} step {n} loss {choose.random():.5f} and some more words".encode()]
            raw = lines[0] + b"\n"
        yield raw, [line.decode("utf-8", "backslashreplace") for line in lines]
        n += len(lines)


JUNK = [byte for byte in range(256) if byte not in b"\r\n"]


def write(data):
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    choose = random.Random(f"cuts of {os.environ['NODE_RANK']}")
    held = b""
    for raw, _ in said(int(os.environ["NODE_RANK"]), int(sys.argv[1])):
        held += raw
        if len(held) > 30_000:  # cut wherever it falls, in the middle of a character too
            at = choose.randrange(len(held))
            write(held[:at])
            held = held[at:]
    write(held)
