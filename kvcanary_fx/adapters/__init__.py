"""Connections to serving engines that are not asked to change their code."""
