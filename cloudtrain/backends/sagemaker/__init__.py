"""The backends `sagemaker` (training jobs on AWS) and `sagemaker-local` (the same jobs in Docker on this machine)."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.backends.sagemaker had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
