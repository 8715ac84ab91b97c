"""Plans in the trainers of other frameworks, each by its own conventions."""
