"""Importing much at once in somebody's own process: what a command avoids for its whole life, put off for that moment.

Hundreds of thousands of objects are made that all stay. Looking for garbage among them is a tenth of the time that
google-cloud-aiplatform takes to be imported, and pydantic's search for plugins reads the metadata of every installed
package for the first model. Our own models need none; those of others are built before or after, and have theirs.
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType

PLUGINS = "pydantic.plugin._loader"  # where pydantic moves it, it looks again: slower, and a test tells


def skip_plugins() -> ModuleType | None:
    """Keep pydantic from looking for plugins and return what stands in its loader's place; None where that is loaded."""
    if PLUGINS in sys.modules:
        return None
    stub = sys.modules[PLUGINS] = ModuleType(PLUGINS)
    stub.__dict__["get_plugins"] = tuple
    return stub


class Quickly:
    """A context in which the collector rests and pydantic looks for no plugins; both are as before behind it."""

    def __init__(self) -> None:
        self._collected = False
        self._stub: ModuleType | None = None

    def __enter__(self) -> None:
        self._collected = gc.isenabled()
        gc.disable()
        self._stub = skip_plugins()

    def __exit__(self, *_: object) -> None:
        if self._collected:
            gc.enable()
        if self._stub is not None and sys.modules.get(PLUGINS) is self._stub:
            del sys.modules[PLUGINS]
