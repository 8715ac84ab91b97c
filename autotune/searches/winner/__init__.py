"""The end of a search: the best are measured again, and the winner becomes the plan."""
