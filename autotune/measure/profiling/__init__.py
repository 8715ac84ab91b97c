"""Allocations and time of one optimizer step, module by module."""
