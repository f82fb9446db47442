"""The interface to torch.compile: the backend, the decorator, and whether guarded code runs."""
