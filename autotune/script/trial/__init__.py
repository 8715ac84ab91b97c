"""A script that is a trial: what its first steps tell, and how it is measured and ended."""
