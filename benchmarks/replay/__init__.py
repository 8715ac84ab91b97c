"""Searches replayed over tables of exhaustively measured configurations."""
