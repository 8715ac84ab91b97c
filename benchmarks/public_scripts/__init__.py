"""Public training scripts that were not written for this package, as they stand and with the plan of a search."""
