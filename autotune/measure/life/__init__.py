"""What a job does beside its training steps: the phases of its life, and what piles up in them."""
