"""Runs as figures, as an HTML file, in a notebook, and compared."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.report had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
