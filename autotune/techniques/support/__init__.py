"""What techniques are built from: a base, the facts that they choose by, and what they need of torch and the system."""
