"""Violations, their texts, the log and the summary."""
