"""Chooses which configuration is tried next."""
