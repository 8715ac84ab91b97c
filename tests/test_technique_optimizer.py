from autotune.techniques.optimizer import Optimizer
from autotune.testing.techniques import TechniqueContract


class TestOptimizer(TechniqueContract):
    technique = Optimizer
    lacking = (Optimizer(kind="for_loop"), Optimizer(kind="foreach"), Optimizer(kind="fused"))
