"""The trial: a process of its own, how it is started, watched and ended, and what its end means."""
