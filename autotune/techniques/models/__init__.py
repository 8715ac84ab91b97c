"""Techniques that train another model of the job's: smaller ones, and those that the task offers."""
