"""What is done for a run that lives: its log, metrics and status are collected, its end is stored, the next one sent.

In come runs that were handed over, with the environments of their shells. Out come rows of the history, the copy of
each log in the home (history/spool.py), notifications (report/notify.py), and further attempts.

    watch_all   the process: one for each home and host, elected by a lease; workers have the environments of other shells
    scheduler   the one loop: what is due, in which thread; `cloudtrain wait --foreground` runs it in its own thread
    groups      when each run of an account is due, and how many calls the account allows
    watch       one look at one run; collect has its log and metrics, ending its end and what follows

The law of this package: nothing is lost and nothing counts twice. Whatever is read goes into the store together with
the place up to which it was read, so that a watcher that is killed at any step is replaced by one that continues
there. Platforms are asked no more often than their accounts allow, and never with the credentials of another shell.
Attempts are sent by sending/ alone; what a user holds, a `Run`, is not known here.
"""
