"""Models of many builds, and whether they are cut in the right places."""
