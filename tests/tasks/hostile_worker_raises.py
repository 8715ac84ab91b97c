"""A sample cannot be read, in a loader worker."""

import healthy
from healthy import batch_size, build_model, compute_loss  # noqa: F401
from torch.utils.data import Dataset

loader_options = {"num_workers": 1}


class _Broken(Dataset):
    def __init__(self):
        self._samples = healthy.build_dataset()

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        if index == 7:
            raise ValueError("sample 7 is broken")
        return self._samples[index]


def build_dataset():
    return _Broken()
