"""Whether a configuration still trains the same model as well: losses, splits, leaks, quality."""
