"""A running search as people and programs see it: a live panel, plain lines, a file of events."""
