"""A run from its plan to its end: planned, submitted, watched, retried, attached.

Here is what a user calls and holds: `submit`, `Run`, lists, `attach`. Below are three packages, and each imports only
those after it: watching/ (a run that lives), sending/ (exactly once), planning/ (no effects).

`cloudtrain.runs` is a public function as well: a call of this package is a call of that (listing.py).
"""

import sys


class _Runs(type(sys)):  # type: ignore[misc]
    def __call__(self, *words: object, **arguments: object) -> object:
        from cloudtrain.runs.listing import runs

        return runs(*words, **arguments)  # type: ignore[arg-type]


sys.modules[__name__].__class__ = _Runs
