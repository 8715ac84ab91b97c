"""Plans in the jobs of other frameworks, by each framework's own conventions; none is imported before it is used."""
