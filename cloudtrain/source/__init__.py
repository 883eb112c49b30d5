"""A source directory becomes a bundle: listed, searched for secrets, archived."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.source had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
