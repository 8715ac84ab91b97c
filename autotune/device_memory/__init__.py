"""What a CUDA device charges a process beside its tensors, and holding a process to less than the device has."""
