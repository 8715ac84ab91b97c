"""Blocks whose inputs are found again from their outputs."""
