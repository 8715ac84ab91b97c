"""``benchmarks.cards``: curves by hand arithmetic, the order in which models are predicted, and what the jobs keep."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from autotune.measure.profiling.allocations import Phase
from autotune.measure.profiling.tracer import Tracer
from autotune.units import MIB
from benchmarks.cards.casts import LastingCastsSGD, keep_casts
from benchmarks.cards.rungs import in_turn
from benchmarks.cards.speed import curves

ROWS = """job,card,batch,cpu,mib,samples_per_s,time
one,L40S,12,8,10000,100,0
one,L40S,12,16,10100,104,0
one,L40S,6,8,6000,120,0
one,L40S,3,8,4000,90,0
one,L40S,24,8,45000,500,0
two,L40S,1,8,2000,10,0
"""


def test_a_curve_has_the_batches_that_a_search_may_take(tmp_path):
    """24 leaves less than a twentieth of 46,068 MiB free, and two has one batch. Of 12: 12, 6, its third 4, and 3; at 4
    the speed is 90 + 30 log(4/3)/log(2) = 102.45 and the peak 4,000 + 2,000/3 MiB. 12 was measured twice: their median,
    and the higher peak."""
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    (curve,) = curves(path)
    found = {entry.settings.batch.micro: (entry.samples_per_s[0], entry.peak_bytes[0] / MIB) for entry in curve.entries}
    assert curve.name == "one on L40S"
    assert found == {
        3: (90.0, 4000.0),
        4: (pytest.approx(102.45, abs=0.01), pytest.approx(4666.67, abs=0.01)),
        6: (120.0, 6000.0),
        12: (102.0, 10100.0),
    }
    assert curve.best == 120.0
    assert curve.slow(found[12][0]) == pytest.approx(0.15)


def test_models_are_predicted_by_families_in_turn_and_once_each():
    """Nor does the order of the rows change it."""
    names = ["vgg13", "vgg11_bn", "resnet18", "resnet34", "resnet50", "vit_base"]
    rows = [{"model": name, "layout": layout} for name in names for layout in ("nchw", "nhwc")]
    found = [*in_turn(rows)]
    assert sorted(row["model"] for row in found) == sorted(names)
    assert [re.match("[a-z]+", row["model"])[0] for row in found] == ["resnet", "vgg", "vit", "resnet", "vgg", "resnet"]
    assert found == [*in_turn(reversed(rows))]


@pytest.mark.parametrize("lasts", [True, False])
def test_weights_copies_last_until_the_step_where_backward_is_within_autocast_too(lasts):
    """A weight of 64 by 64 in bfloat16 takes 8,192 bytes, which backward gives back otherwise."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = LastingCastsSGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with Tracer(model, optimizer, torch.device("cpu")) as tracer:
            tracer.batch(x := torch.ones(3, 64))
            with tracer.phase(Phase.FORWARD), torch.autocast("cpu", torch.bfloat16):
                if lasts:
                    keep_casts()
                loss = model(x).sum()
            with tracer.phase(Phase.BACKWARD):
                loss.backward()
            with tracer.phase(Phase.OPTIMIZER):
                optimizer.step()
                optimizer.zero_grad()
        trace = tracer.trace()
        (cast,) = (one for one in trace.allocations if (one.num_bytes, one.phase) == (8192, Phase.FORWARD))
        assert cast.died is not None
        assert (cast.died > trace.spans[-1].start) == lasts
