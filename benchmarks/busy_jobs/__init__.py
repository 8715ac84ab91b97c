"""Jobs of :mod:`benchmarks.busy` that are not among the examples, and what keeps a processor busy beside them."""
