from autotune.techniques.allocator import Allocator
from autotune.testing.techniques import TechniqueContract


class TestAllocator(TechniqueContract):
    technique = Allocator
    bitwise = True
    lacking = (Allocator(kind="tcmalloc"), Allocator(kind="jemalloc"), Allocator(kind="expandable_segments"))
