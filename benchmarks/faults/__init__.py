"""Faults, each done to the real command line and looked at from outside: see ``__main__``."""
