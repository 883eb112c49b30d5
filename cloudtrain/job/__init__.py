"""The job file: what it may say, how it is read, and where every value came from."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.job had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
