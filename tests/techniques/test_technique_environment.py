"""What two techniques, or a technique and the user, ask for of one environment variable."""

from __future__ import annotations

from typing import ClassVar

import pytest

from autotune.errors import PlanError
from autotune.plan import Plan
from autotune.techniques import Settings, Technique
from autotune.techniques.allocator import Allocator
from autotune.workers import MeasureRequest
from autotune.workers.trial.environment import trial_environment

PRELOAD, OPTIONS, OLD_OPTIONS = "LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


class _Asks(Technique):
    """Needs one variable."""

    variable: str
    value: str

    def environment(self) -> dict[str, str]:
        return {self.variable: self.value}


class _First(_Asks):
    name: ClassVar[str] = "first"


class _Second(_Asks):
    name: ClassVar[str] = "second"


class _Settings(Settings):
    first: _First
    second: _Second


def both(variable: str, one: str, other: str) -> Settings:
    first, second = {"variable": variable, "value": one}, {"variable": variable, "value": other}
    return _Settings.model_validate({"first": first, "second": second})


def test_libraries_of_both_are_preloaded():
    """Each once, the user's own last; the user may have separated theirs by blanks."""
    settings = both(PRELOAD, "liba.so", "libb.so:liba.so")
    assert settings.environment({}) == {PRELOAD: "liba.so:libb.so"}
    assert settings.environment({PRELOAD: "libown.so liba.so"}) == {PRELOAD: "liba.so:libb.so:libown.so"}


def test_options_of_both_are_in_force():
    """Those of the allocator of CUDA, a list in brackets whole; the user's own too, under the older name as well."""
    lists = "roundup_power2_divisions:[256:1,512:2]"
    settings = both(OPTIONS, f"expandable_segments:True,{lists}", "expandable_segments:True")
    assert settings.environment({}) == {OPTIONS: f"expandable_segments:True,{lists}"}
    for name in (OPTIONS, OLD_OPTIONS):
        found = settings.environment({name: "max_split_size_mb:64"})
        assert found == {OPTIONS: f"expandable_segments:True,{lists},max_split_size_mb:64"}


def test_the_older_name_is_the_same_variable():
    found = both(OPTIONS, "a:1", "a:1").model_copy(update={"second": _Second(variable=OLD_OPTIONS, value="b:2")})
    assert found.environment({}) == {OPTIONS: "a:1,b:2"}


def test_one_option_with_two_values_is_a_conflict():
    """Named are the variable, both techniques and both values."""
    message = r"PYTORCH_ALLOC_CONF: settings\.first needs 'a:1', but settings\.second has 'a:2'\. Leave"
    with pytest.raises(PlanError, match=message):
        both(OPTIONS, "a:1", "b:3,a:2").environment({})


def test_another_variable_has_one_value():
    assert both("KMP_BLOCKTIME", "1", "1").environment({"KMP_BLOCKTIME": "1"}) == {"KMP_BLOCKTIME": "1"}
    with pytest.raises(PlanError, match=r"KMP_BLOCKTIME: settings\.first needs '1', but settings\.second has '0'"):
        both("KMP_BLOCKTIME", "1", "0").environment({})


def test_the_users_own_value_is_not_overwritten():
    """Where both cannot be had, that is said."""
    with pytest.raises(PlanError, match=r"needs '1', but your environment has '0'\. Unset it there, or leave settings"):
        both("KMP_BLOCKTIME", "1", "1").environment({"KMP_BLOCKTIME": "0"})
    segments = Settings(allocator=Allocator(kind="expandable_segments"))
    with pytest.raises(PlanError, match="your environment has 'expandable_segments:False'"):
        segments.environment({OLD_OPTIONS: "expandable_segments:False"})


def test_a_trial_joins_its_plans_variables_to_its_own():
    """Those of the process that starts trials, and the request's: as ``autotune run`` does with a job's."""
    settings = both(PRELOAD, "liba.so", "libb.so")
    request = MeasureRequest.model_construct(environment={PRELOAD: "librequest.so"}, plan=Plan(settings=Settings()))
    object.__setattr__(request.plan, "settings", settings)
    found = trial_environment(request, {PRELOAD: "libown.so", "HOME": "/home/user"})
    assert found == {PRELOAD: "liba.so:libb.so:librequest.so", "HOME": "/home/user"}
