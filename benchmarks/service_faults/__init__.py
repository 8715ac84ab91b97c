"""Faults done to the service, and races for its leases: ``python -m benchmarks.service_faults``."""
