"""Which configuration is tried next."""
