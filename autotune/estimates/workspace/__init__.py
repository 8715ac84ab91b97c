"""Memory that kernels allocate while they run, beside their operands and results."""
