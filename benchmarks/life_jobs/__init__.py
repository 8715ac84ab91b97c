"""Published faults of evaluating, saving and resuming as small jobs, each as it was and mended."""
