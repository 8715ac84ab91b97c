"""Whether scripts of thirty styles train the same with a plan as without."""
