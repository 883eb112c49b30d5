"""The checks of a plan: one function each, which says what a person should know of a planned job, or refuses it.

A check takes a `Case` and yields sentences (notes) and `Problem`s. CHECKS (table.py) has all of them, and its order
is the order of a plan's notes, by importance: what loses work first, then what costs money. A new check is a function
and its row there. The modules say what a check reads:

    job.py     the job, its plan, and the node's code, which may refuse the job; `Case`, what every check is given, is there
    source.py  the text of the source's files

What policies refuse comes afterwards, when nothing else is wrong: `Governed.check` in policy/apply.py.
"""
