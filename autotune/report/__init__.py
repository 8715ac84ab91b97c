"""What people read: words, the live display, ``show``, ``doctor``. The only formatting of units beside the CLI."""
