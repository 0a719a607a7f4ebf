"""The control plane: the truth about jobs. REST, status page, database. Knows nothing of tensors or of Ray."""
