"""Three jobs that go on from trained weights, each a task file that need not import the others."""
