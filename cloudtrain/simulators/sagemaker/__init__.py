"""SageMaker simulator: `python -m cloudtrain.simulators.sagemaker --bucket my-bucket`."""

TYPE_CHECKING = False
if not TYPE_CHECKING:
    # Old imports from the former module cloudtrain.simulators.sagemaker.
    def __getattr__(name: str) -> object:
        from cloudtrain._moved import member

        return member(__name__, name)
