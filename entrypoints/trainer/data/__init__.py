"""Training data: documents, tokenizers, samples, batches."""
