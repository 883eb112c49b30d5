"""What a run will be: from a job, a target and a packaged source to a plan, which can be shown, stored and sent.

In comes a job (a file, a dictionary or a function), the configuration of this machine, and the runs of the history
that it names: inputs, runs to wait for, what was spent. Out comes a `Plan` with its request, notes, prices and
candidates, or one error that names all problems with their keys.

The law of this package: a plan has no effects. It stores no intent and sends nothing, the same job and source give the
same identity, and what is sent is what was planned, byte for byte. What a platform would refuse is refused here,
before anything costs money. Nothing in here knows how runs are sent or watched.
"""
