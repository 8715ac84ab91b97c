"""How fast a training is, how sure that is, and what of its time was not its own."""
