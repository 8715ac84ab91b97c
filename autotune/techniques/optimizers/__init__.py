"""Techniques that change how the optimizer updates parameters."""
