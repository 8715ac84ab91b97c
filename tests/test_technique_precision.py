from autotune.techniques.precision import Precision
from autotune.testing.techniques import TechniqueContract


class TestPrecision(TechniqueContract):
    technique = Precision
    lacking = (Precision(kind="bf16"), Precision(kind="tf32"), Precision(kind="fp16"))
