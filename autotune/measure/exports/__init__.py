"""A plan's model as a file that other runtimes take: written, read back in a process of its own, and compared."""
