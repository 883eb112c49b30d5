"""Stores and queries the history of all runs in SQLite."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # Old imports from the former module cloudtrain.history.
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
