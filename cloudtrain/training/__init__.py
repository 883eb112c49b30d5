"""A model in memory, trained over nodes through a submitted job."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.training had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
