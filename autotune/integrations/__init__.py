"""Applies plans in jobs of other frameworks, by their own conventions. A framework is imported when it is used."""
