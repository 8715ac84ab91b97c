"""What techniques that change the model buy, and what of its quality they cost: by hand, and as a search finds it."""
