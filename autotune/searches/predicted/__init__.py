"""Predictions: of a configuration before it is measured, made in child processes, corrected by trials; of a search's
duration."""
