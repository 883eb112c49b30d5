"""Make a bundle of a source that a run left in its output: its files, and the runtime of this installation.

Whoever can write to that output can have written anything: an archive is unpacked into a folder that nothing leads out of,
below a limit, and its files must have the digest that the run's record names.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.errors import BadSource
from cloudtrain.source.bundle import Bundle
from cloudtrain.source.files import Source
from cloudtrain.source.limits import MAX_TREE
from cloudtrain.source.node_code import module


def package(data: bytes, about: Mapping[str, Any], into: Path, *, trainer: bool, **exceptions: Sequence[str]) -> Bundle:
    """Return the bundle of a packed source; blocking.

    Args:
        data: the archive, as entrypoints/launcher/output/source.py packs it.
        about: `source_sha256`, `commit` and `dirty` of the bundle that it was a part of.
        into: the folder of bundles.
        trainer, exceptions: as of `Bundle.make`.

    Raises:
        BadSource: the archive is damaged, or holds other files.
    """
    code = module("launcher.folder_writer")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".received-", dir=into) as folder:
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
                size = 0
                for member in archive:
                    size += member.size
                    if size > MAX_TREE or not (member.isreg() or member.issym()):
                        raise BadSource(f"the archive holds {member.name!r}, which is too large or is not a file")
                with code.FolderWriter(folder, new=True) as writer:
                    code.unpack(archive, writer)
        except (tarfile.TarError, zlib.error, OSError, EOFError, ValueError, code.Unsafe) as error:
            raise BadSource(f"the archive is damaged: {error}") from None
        bundle = Bundle.make(
            Source.whole(Path(folder), about["commit"], about["dirty"]), into, trainer=trainer, **exceptions
        )
    if bundle.source_sha256 != about["source_sha256"]:
        raise BadSource("the archive does not have the same files as the run's source")
    return bundle
