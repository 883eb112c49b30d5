"""Import large libraries quickly: no garbage collection and no search for pydantic plugins meanwhile.

An import makes hundreds of thousands of objects that all stay. Looking for garbage among them is a tenth of the time of
importing google-cloud-aiplatform. pydantic's search for plugins reads the metadata of every installed package when the
first model is built; our models need none. Models that others build before or after have theirs.
"""

from __future__ import annotations

import gc
import os

DISABLE_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"  # https://docs.pydantic.dev/latest/concepts/plugins/ (2026-11-23)


class Quickly:
    """A context without garbage collection and pydantic plugins; it leaves both as they were."""

    def __init__(self) -> None:
        self._collected = False
        self._disabled: str | None = None

    def __enter__(self) -> None:
        self._collected = gc.isenabled()
        gc.disable()
        self._disabled = os.environ.get(DISABLE_PLUGINS)
        os.environ[DISABLE_PLUGINS] = "__all__"

    def __exit__(self, *_: object) -> None:
        if self._collected:
            gc.enable()
        if self._disabled is None:
            os.environ.pop(DISABLE_PLUGINS, None)
        else:
            os.environ[DISABLE_PLUGINS] = self._disabled
