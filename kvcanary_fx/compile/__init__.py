"""What torch.compile calls: the backend, the decorator, and whether guarded code runs."""
