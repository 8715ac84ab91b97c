"""Many searches that share devices and what they measure."""
