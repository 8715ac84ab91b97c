"""A plan put on a task, and the training that comes of it: what a trial measures, a verify checks and a job runs."""
