from autotune.techniques.data_loading import DataLoading
from autotune.testing.techniques import TechniqueContract


class TestDataLoading(TechniqueContract):
    technique = DataLoading
    bitwise = True
    lacking = (
        DataLoading(cache="host"),
        DataLoading(cache="device"),
        DataLoading(num_workers=2),
        DataLoading(pin_memory=True),
    )
