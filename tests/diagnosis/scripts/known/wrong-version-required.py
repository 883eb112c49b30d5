from transformers.utils.versions import require_version

require_version("datasets>=99.0", "To fix: pip install -r examples/pytorch/language-modeling/requirements.txt")
