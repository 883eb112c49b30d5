"""The backends `vertex` (custom jobs on Vertex AI) and `vertex-local` (the same jobs against a local simulator)."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.backends.vertex had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
