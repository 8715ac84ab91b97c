"""JSON Schemas of plans and spaces, by which editors complete them: ``python -m autotune.schemas`` writes the files."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from .plan import Plan
from .search_spaces import SearchSpace

SCHEMAS: dict[str, type[BaseModel]] = {"plan.schema.json": Plan, "space.schema.json": SearchSpace}
"""Each file beside this module, and the model that it describes."""


def schema_text(model: type[BaseModel]) -> str:
    """The model's JSON Schema as the committed file has it."""
    return json.dumps(model.model_json_schema(by_alias=True, mode="validation"), indent=2) + "\n"


if __name__ == "__main__":
    for name, model in SCHEMAS.items():
        Path(__file__).with_name(name).write_text(schema_text(model), encoding="utf-8")
