"""Kubernetes simulator whose pods are local processes."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # Old imports from the former module cloudtrain.simulators.kubernetes.
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
