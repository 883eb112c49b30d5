"""SageMaker on loopback: `python -m cloudtrain.simulators.sagemaker --bucket my-bucket`."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # what the module cloudtrain.simulators.sagemaker had, before it was a package
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
