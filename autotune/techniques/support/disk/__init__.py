"""What stands in an unnamed file until it is read."""
