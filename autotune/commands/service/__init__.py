"""``autotune serve``, and the commands that ask a service."""
