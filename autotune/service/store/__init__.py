"""What the service keeps, in SQL: searches, their events and trials, leases, tokens."""
