"""A Kubernetes cluster on loopback whose pods are processes of this machine."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.simulators.kubernetes had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
