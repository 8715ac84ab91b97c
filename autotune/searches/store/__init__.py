"""What a search keeps: its study, in a storage that no other search writes to meanwhile; and the pace of its trials."""
