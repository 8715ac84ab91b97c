"""``autotune search --devices``: one training over unlike devices."""
