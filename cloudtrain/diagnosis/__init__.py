"""Diagnose why a run failed, from its end and the last lines of its log."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # names of the module cloudtrain.diagnosis, from before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
