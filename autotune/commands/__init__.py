"""What each command does once its options are parsed: one file each, imported when it is needed."""
