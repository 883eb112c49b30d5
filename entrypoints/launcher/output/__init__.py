"""The run's folders in an object store: checkpoints, outputs, logs, history."""
