"""Contracts whose tests every member of a family inherits: techniques, executors."""
