"""What is done for a run that lives: its log, metrics and status are collected, its end is stored, the next one sent.

In come runs that were handed over, with the environments of their shells. Out come rows of the history, the copy of
each log in the home, messages of notify, and further attempts. A home has one watcher on a host, elected by a lease.

The law of this package: nothing is lost and nothing counts twice. Whatever is read goes into the store together with
the place up to which it was read, so that a watcher that is killed at any step is replaced by one that continues
there. Platforms are asked no more often than their accounts allow, and never with the credentials of another shell.
Attempts are sent by sending/ alone; what a user holds, a `Run`, is not known here.
"""
