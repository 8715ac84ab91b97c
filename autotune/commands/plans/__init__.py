"""What is done with a plan that a search has left."""
