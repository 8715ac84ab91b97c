"""A model changed in place so that its training fits a memory budget, by predictions alone."""
