"""Which blocks to recompute so that a training stays within a memory limit."""
