"""The service over HTTP: its routes, who is let in, its page."""
