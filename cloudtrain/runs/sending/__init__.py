"""How a plan becomes an attempt on a platform, exactly once: sent, adopted, retried, moved, resumed, waiting.

In comes a plan that is checked. Out comes an attempt with a handle, a stored refusal, or an attempt of which it is
not known yet whether it began; then the run is handed over to the watcher of its home.

The law of this package: what is stored comes first. The intent is stored before the platform is called (send.py, the
only caller of `Backend.submit`), its answer before it is returned, and an attempt without an answer is looked for on
its platform before another one is sent. A run has at most one live attempt, and its attempts stay within its cap.
The modules of planning/ are used here; nothing in here knows how the watcher works.
"""
