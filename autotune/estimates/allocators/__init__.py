"""What a sequence of allocations and frees takes of memory, allocator by allocator."""
