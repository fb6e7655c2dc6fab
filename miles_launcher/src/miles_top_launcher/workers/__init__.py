"""Processes that the launcher starts: each hosts one engine and speaks `channel` with the launcher."""
