"""What stands in an unnamed file, or on a card's host, until it is read."""
