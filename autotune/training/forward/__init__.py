"""A plan for inference, applied to a task."""
