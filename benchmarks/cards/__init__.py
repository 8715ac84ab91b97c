"""Predictions held against public measurements of real cards.

    python -m benchmarks.cards [--job bert-fp32]... [--card H100]...  # memory: milabench's rows
    python -m benchmarks.cards --rungs [--model resnet50]...          # timm's largest batch on an RTX 3090
    python -m benchmarks.cards --speed                                # milabench's batch curves as searches

`measured/` has the rows with their sources. Models are built from `transformers`' configurations and by `torchvision`
and `timm` (`pip install timm torchvision`), and traced; nothing is computed.
"""
