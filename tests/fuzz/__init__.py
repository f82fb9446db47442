"""Random programs against an oracle of what was last legally written."""
