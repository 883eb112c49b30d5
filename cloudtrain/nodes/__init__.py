"""A node's folder and its supervisor, on this machine or over SSH."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.nodes had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
