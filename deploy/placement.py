"""Asks a service which types of cards a job fits, for `admission_webhook.py` and `slurm_filter.py`. Needs Python alone.

AUTOTUNE_SERVER and AUTOTUNE_TOKEN (role `submit`) say where the service is.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

PATIENCE_S = 5.0
"""A scheduler waits; what is kept is answered at once."""


class NoAnswer(Exception):
    """Why there is none, in words."""


def ask(fingerprint: str, cards: list[str], budget: str | None = None) -> list[dict[str, Any]]:
    """A row for each type of card: `fits`, `how`, `peak_bytes`, `high_bytes`, `host_bytes`, `sure`.

    Raises:
        NoAnswer: the service does not answer, or refuses.
    """
    body = {"fingerprint": fingerprint, "cards": cards, **({"budget": budget} if budget else {})}
    request = urllib.request.Request(
        os.environ.get("AUTOTUNE_SERVER", "http://127.0.0.1:8470").rstrip("/") + "/v1/predict",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('AUTOTUNE_TOKEN', '')}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            rows: list[dict[str, Any]] = json.load(answer)["cards"]
            return rows
    except urllib.error.HTTPError as refused:
        try:
            said = json.load(refused)["detail"]
        except (ValueError, KeyError, TypeError):
            said = refused.reason
        raise NoAnswer(f"autotune: {said}") from None
    except (OSError, ValueError, KeyError) as reason:
        raise NoAnswer(f"autotune: the service does not answer: {reason}") from None


def words(row: dict[str, Any]) -> str:
    """``h100: 7.84 GiB, measured``."""
    if row["how"] == "unknown":
        return f"{row['card']}: unknown"
    return f"{row['card']}: {row['high_bytes'] / 2**30:.2f} GiB, {row['how']}{'' if row['fits'] else ', does not fit'}"
