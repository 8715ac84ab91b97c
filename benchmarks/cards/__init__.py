"""Predictions held against public measurements of real cards.

    python -m benchmarks.cards [--job bert-fp32]... [--card H100]...  # memory: milabench's rows
    python -m benchmarks.cards --rungs [--model resnet50] [--most 200] [--keep]  # timm's largest batch on an RTX 3090
    python -m benchmarks.cards --speed                                # milabench's batch curves as searches

`measured/` has the rows with their sources. Models are built from `transformers`' configurations, by `torchvision`,
`timm` and `diffusers`, and traced; nothing is computed. For T5, Reformer and diffusion, milabench's versions go into a
folder that comes first on PYTHONPATH: `pip install --no-deps --target FOLDER transformers==4.49.0
huggingface-hub==0.29.3 tokenizers==0.21.0 diffusers==0.32.2`. With version 5.23 T5 is predicted 2.2 % too low; BERT's
rows are of 5.23, since 4.49 reads the values of its mask.
"""
