"""A user's own script as the job: the command that starts it, the launcher that it runs under, what that applies."""
