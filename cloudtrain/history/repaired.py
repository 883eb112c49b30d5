"""Runs a method of the history once more where it met a damaged file, which was repaired meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

from cloudtrain.errors import BadRequest, UnknownRun
from cloudtrain.history.database import Repaired

T = TypeVar("T")


def repaired(cls: type[T]) -> type[T]:
    """Let the public methods of a class that has a `database` begin again where they have met a damaged history."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Repaired:
                pass
            except (ValueError, TypeError, LookupError, BadRequest) as error:
                if isinstance(error, UnknownRun) or not self.database.repair(error):
                    raise
            return method(self, *args, **kwargs)

        return call

    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(cls, name, wrap(method))
    return cls
