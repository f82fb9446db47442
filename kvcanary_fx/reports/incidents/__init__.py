"""What is left of a violation in the morning: the file of an incident, how it is written, read and shown."""
