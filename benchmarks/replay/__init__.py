"""Searches replayed over tables of measured configurations."""
