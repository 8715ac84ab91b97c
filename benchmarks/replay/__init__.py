"""Searches over tables of exhaustively measured configurations."""
