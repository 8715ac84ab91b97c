from autotune.techniques.checkpointing import Checkpointing
from autotune.testing.techniques import TechniqueContract


class TestCheckpointing(TechniqueContract):
    technique = Checkpointing
    bitwise = True
    lacking = (Checkpointing(kind="blocks"), Checkpointing(kind="blocks", every=2))
