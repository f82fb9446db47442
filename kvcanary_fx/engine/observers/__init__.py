"""What looks at the pools of a session between steps."""
