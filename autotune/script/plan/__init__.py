"""What puts a plan on a running script."""
