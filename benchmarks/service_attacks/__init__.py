"""Attacks on a service that an admin has started, by kind."""
