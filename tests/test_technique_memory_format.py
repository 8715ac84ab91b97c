from autotune.techniques.memory_format import MemoryFormat
from autotune.testing.techniques import TechniqueContract


class TestMemoryFormat(TechniqueContract):
    technique = MemoryFormat
    lacking = (MemoryFormat(kind="channels_last"),)
