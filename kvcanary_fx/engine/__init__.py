"""A session that knows an engine's pools, requests and steps."""
