"""``autotune submit | status | logs | cancel | resume | prioritize | fetch``: searches of a service."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import NothingFits, UserError
from ...report.printing import escaped, print_json, tell
from ...service.client import Client, ServiceError
from ...units import format_duration

_EXIT_CODES = {"SUCCEEDED": 0, "NOTHING_FITS": NothingFits.exit_code, "ERROR": 1}


def submit(client: Client, spec: dict[str, Any], folder: Path | None, wait: bool, json: bool) -> int:
    """Submit a search and print its id; with ``wait`` show what happens, until it has ended.

    Args:
        client: of the service.
        spec: the search.
        folder: what is sent; None where ``spec`` names one that the service sees.
        wait: until it has ended.
        json: print one document.

    Returns:
        The exit code: with ``wait`` that of the search.
    """
    search = client.submit(folder, **spec)
    if not wait:
        show(search, json)
        return 0
    tell(f"search {search['id']}: {search['state']}")
    try:
        for event in client.events(search["id"]):
            tell(_line(event))
    except (KeyboardInterrupt, ServiceError):
        tell(f"search {search['id']} goes on: `autotune status` shows it, `autotune cancel` ends it.")
        raise
    search = client.search(search["id"])
    show(search, json)
    return exit_code(search)


def status(client: Client, search_id: str | None, json: bool, **like: Any) -> None:
    """Print one search, or all of them, each that waits with its place in the queue, or with whom it waits for.

    Args:
        client: of the service.
        search_id: which; None is all.
        json: print one document.
        like: as :meth:`.Client.searches` takes it; None is any.

    Raises:
        UserError: one search was named, and what it should be like.
    """
    told = [name for name, value in like.items() if value]
    if search_id is not None and told:
        raise UserError(f"SEARCH is one search: leave it out, or leave out --{' and --'.join(told)}.")
    found = [*client.searches(**like)] if search_id is None else [client.search(search_id)]
    places = client.queue() if any(search["state"] == "QUEUED" for search in found) else {}
    turns = client.turns() if any(search["state"] == "RUNNING" for search in found) else {}
    found = [{**each, "place": places.get(each["id"]), "waits_for": turns.get(each["id"])} for each in found]
    if search_id is not None:
        show(found[0], json)
        return
    if not found and not json:
        tell("No search is like that." if told else "Nothing was submitted yet: autotune submit model.py --budget 8GiB")
    print_searches(found, json)


def print_searches(searches: Sequence[dict[str, Any]], json: bool) -> None:
    """Print a line for each, or one document."""
    if json:
        print_json({"searches": searches})
    for search in [] if json else searches:
        print(escaped(row({**search, "message": search["message"].partition("\n")[0]})))


def logs(client: Client, search_id: str, follow: bool) -> None:
    """Print what a search's driver printed; with ``follow``, what happens as it does."""
    if not follow:
        print(escaped(client.text(search_id, "log")), end="")
        return
    for event in client.events(search_id):
        print(escaped(_line(event)), flush=True)


def fetch(client: Client, search_id: str, output: Path, json: bool) -> None:
    """Write a search's plan to a file.

    Raises:
        PlanError: the file cannot be written.
        ServiceError: there is no plan.
    """
    client.fetch(search_id, output)
    if json:
        print_json({"path": str(output)})
    else:
        print(output)


def exit_code(search: Mapping[str, Any]) -> int:
    """Of a search that has ended."""
    return _EXIT_CODES.get(search["state"], 2)


def show(search: dict[str, Any], json: bool) -> None:
    """Print one search, as a line or a document."""
    if json:
        print_json(search)
    else:
        print(escaped(row(search)))


def row(search: Mapping[str, Any]) -> str:
    """A search on one line: what its plan comes to, or how far it is and the best trial so far."""
    age = format_duration((search["ended_at"] or time.time()) - search["created_at"])
    budget = search["spec"]["budget"]
    place = f"no. {search['place']} in the queue" if search.get("place") else ""
    again = "" if search["retry_at"] is None else f"tried again at {_clock(search['retry_at'])}"
    parts = [search["id"], f"{search['state']:12}", f"{age:>14}", search["name"], f"of {search['owner']}"]
    parts += [f"within {budget}" if budget else "", place, *found(search), _turn(search), search["message"], again]
    return "  ".join(part for part in parts if part)


def found(search: Mapping[str, Any]) -> Sequence[str]:
    """What a search has found: its plan's gain and peak; where it has none, the best of its trials as such, and while
    it runs how far it is."""
    summary = search["summary"]
    if result := summary.get("result"):
        return (result["words"],)
    phase = summary.get("phase", "") if search["state"] in ("RUNNING", "CANCELLING") else ""
    words = summary.get("phases", {}).get(phase, {}).get("words", "")
    trials = f"{summary['num_ended']} of {summary['num_trials']} trials" if "num_trials" in summary else ""
    best = summary.get("best", {}).get("words", "")
    now = f"{phase}: {words}" if words else phase
    return (now if phase and phase != "trials" else trials, f"best trial {best}" if best else "")


def _turn(search: Mapping[str, Any]) -> str:
    """Whose trials run while this one waits."""
    if (others := search.get("waits_for")) is None:
        return ""
    said = ", ".join(f"{other['name']} of {other['owner']} ({other['id']})" for other in others)
    return "waits for a device, which is used by " + (said or "another search")


def _line(event: dict[str, Any]) -> str:
    data = event["data"]
    at = _clock(data["at"])
    words = data.get("words") or data.get("settings") or ""
    match event["kind"]:
        case "state":
            said = f"{data['state']}" + (f": {words}" if words else "")
        case "trial_started" | "trial_ended" | "finalist_ended":
            said = f"{event['kind'].replace('_', ' ')}, trial {data['number']}: {words}"
        case kind:
            said = f"{kind.replace('_', ' ')}" + (f": {words}" if words else "")
    return f"[{at}] {said}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
