"""Names in the Kubernetes objects that this package creates: labels, annotations, containers."""

from __future__ import annotations

RUN, ATTEMPT = "cloudtrain.dev/run", "cloudtrain.dev/attempt"  # labels
STARTED, CANCELLED = "cloudtrain.dev/started", "cloudtrain.dev/cancelled"  # annotations that submit and cancel set
# The value of CANCELLED is when the first container had started, "" if none had.
FIRST_NODE = "cloudtrain.dev/first-node"  # label of pods: the rank of the first node of their role
OUTPUT = "cloudtrain.dev/output"  # annotation: path or URI of the run's output
QUEUE = "kueue.x-k8s.io/queue-name"
# Label: seconds over all admissions of a queue (https://kueue.sigs.k8s.io/docs/concepts/workload, 2026-11-23)
MAX_EXEC = "kueue.x-k8s.io/max-exec-time-seconds"
# Annotation of pods: their containers of other roles, such as "node-server=2", each with the rank of its role's first node.
BESIDE = "cloudtrain.dev/beside"
CONTAINER, UNPACK = "node", "source"  # the launcher's container, and the init container
INSTANCE_TYPE = "node.kubernetes.io/instance-type"  # label of nodes, set by the cloud
