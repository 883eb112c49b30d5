"""Training on machines of one's own, over SSH."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.backends.ssh had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
