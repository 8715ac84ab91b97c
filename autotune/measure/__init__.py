"""Runs a Training for some steps and measures it: speed, memory, and whether it still learns the same."""

from __future__ import annotations

from .measurement import InspectOptions, Measurement, MeasureOptions, Parity

__all__ = ["InspectOptions", "MeasureOptions", "Measurement", "Parity"]
