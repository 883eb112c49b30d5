"""A run from its plan to its end: planned, submitted, watched, retried, attached.

`cloudtrain.runs` is a public function as well: a call of this package is a call of that (report/notebook.py).
"""

import sys


class _Runs(type(sys)):  # type: ignore[misc]
    def __call__(self, **given: object) -> object:
        from cloudtrain.report.notebook import runs

        return runs(**given)  # type: ignore[arg-type]


sys.modules[__name__].__class__ = _Runs
