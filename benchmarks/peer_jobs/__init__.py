"""Training scripts in the manner of those that people run, which know nothing of this package."""
