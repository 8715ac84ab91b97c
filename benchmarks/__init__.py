"""Figures with their evidence: run `python -m benchmarks.<name>` from the repository's root."""
