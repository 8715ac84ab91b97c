"""``autotune search --devices`` and ``share``: one training over unlike devices."""
