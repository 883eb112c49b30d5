"""Import large libraries quickly: no garbage collection and no search for pydantic plugins meanwhile.

An import makes hundreds of thousands of objects that all stay. Looking for garbage among them is a tenth of the time of
importing google-cloud-aiplatform. pydantic's search for plugins reads the metadata of every installed package when the
first model is built; our models need none. Models that others build before or after have theirs.
"""

from __future__ import annotations

import gc
import os
from threading import Lock

DISABLE_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"  # https://docs.pydantic.dev/latest/concepts/plugins/ (2026-11-23)


class Quickly:
    """A context without garbage collection and pydantic plugins; the last one to end leaves both as the first found them.

    Several threads may be in it at once.
    """

    _lock = Lock()
    _inside = 0  # how many contexts have begun and not ended
    _collected = False
    _disabled: str | None = None

    def __enter__(self) -> None:
        with Quickly._lock:
            if not Quickly._inside:
                Quickly._collected, Quickly._disabled = gc.isenabled(), os.environ.get(DISABLE_PLUGINS)
                gc.disable()
                os.environ[DISABLE_PLUGINS] = "__all__"
            Quickly._inside += 1

    def __exit__(self, *_: object) -> None:
        with Quickly._lock:
            Quickly._inside -= 1
            if Quickly._inside:
                return
            if Quickly._collected:
                gc.enable()
            if Quickly._disabled is None:
                os.environ.pop(DISABLE_PLUGINS, None)
            else:
                os.environ[DISABLE_PLUGINS] = Quickly._disabled
