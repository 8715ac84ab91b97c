"""What a job takes on types of cards: from kept measurements, from predictions, and for schedulers."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from service_runs import OPTIONS, archive, bearer, put, serving, submit, until
from sqlalchemy import update

from autotune.estimates.types import Estimate, Fit, Interval
from autotune.plan import Plan, load_plan
from autotune.service.predictions import Predicted, Predictions
from autotune.service.service import forget_old
from autotune.service.store.tables import SEARCHES

GIB = 2**30
DEPLOY = Path(__file__).parents[2] / "deploy"
PLAN = load_plan(Path(__file__).parents[1] / "golden" / "plan.yaml")
FINGERPRINT = PLAN.task.fingerprint
OTHER = "sha256:" + "b" * 64


def on(device: str, peak_gib: float, speed: float) -> Plan:
    """The golden plan, as if it had been found on that device."""
    measured = PLAN.measured.model_copy(
        update={
            "peak": PLAN.measured.peak.model_copy(update={"process": round(peak_gib * GIB)}),
            "samples_per_s": PLAN.measured.samples_per_s.model_copy(
                update={"value": speed, "low": speed, "high": speed}
            ),
        }
    )
    return PLAN.model_copy(
        update={"measured": measured, "environment": PLAN.environment.model_copy(update={"device": device})}
    )


@contextmanager
def serving_plans(state: Path, *plans: Plan, **more: Any) -> Iterator[tuple[Any, Any, list[str]]]:
    """A service with a finished search for each plan; and their ids."""
    with serving(state, **more) as (client, service):
        ids = []
        for plan in plans:
            search_id = submit(client, trials=1)
            until(client, search_id, "SUCCEEDED")
            with service.database.writing() as connection:
                connection.execute(update(SEARCHES).where(SEARCHES.c.id == search_id).values(plan=plan.to_yaml()))
            ids.append(search_id)
        yield client, service, ids


def asked(client: Any, **body: Any) -> Any:
    return client.post("/v1/predict", json=body)


def test_what_was_measured_on_such_a_card_is_answered_with_its_interval(tmp_path):
    with serving_plans(tmp_path / "state", on("NVIDIA H100 80GB HBM3", 10.0, 800.0)) as (client, _, (search_id,)):
        answer = asked(client, fingerprint=FINGERPRINT, cards=["h100", "l40s"])
        assert answer.status_code == 200, answer.text
        first, second = answer.json()["cards"]
        assert (first["card"], first["how"], first["fits"], first["batch"]) == ("h100", "measured", True, 64)
        assert (first["peak_bytes"], first["high_bytes"]) == (10 * GIB, round(10 * GIB * 1.03))
        assert (first["search"], first["host_bytes"]) == (search_id, 3 * GIB)
        assert "3 fresh processes" in first["sure"]
        assert (second["how"], second["fits"]) == ("unknown", False)
        assert "nothing is kept of this job on such a card" in second["sure"]


def test_what_the_processes_differ_by_is_asked_for_twice(tmp_path):
    plan = on("NVIDIA H100", 10.0, 800.0)
    peak = plan.measured.peak.model_copy(update={"spread": GIB})
    plan = plan.model_copy(update={"measured": plan.measured.model_copy(update={"peak": peak})})
    with serving_plans(tmp_path / "state", plan) as (client, _, _):
        row = asked(client, fingerprint=FINGERPRINT, cards=["h100"], budget="11GiB").json()["cards"][0]
    assert (row["low_bytes"], row["peak_bytes"], row["high_bytes"]) == (9 * GIB, 10 * GIB, 12 * GIB)
    assert row["fits"] is False
    assert "2 times the 1 GiB that runs of it differ by" in row["sure"]


def test_of_several_plans_it_is_the_fastest_that_fits_else_the_smallest(tmp_path):
    card = "NVIDIA H100 80GB HBM3"
    with serving_plans(tmp_path / "state", on(card, 40.0, 900.0), on(card, 10.0, 800.0)) as (client, _, (large, small)):
        for budget, search_id, fits in ((None, large, True), ("20GiB", small, True), ("5GiB", small, False)):
            row = asked(client, fingerprint=FINGERPRINT, cards=["h100"], budget=budget).json()["cards"][0]
            assert (row["search"], row["fits"]) == (search_id, fits)


def row_of(client: Any, **more: Any) -> Any:
    body = {"fingerprint": FINGERPRINT, "cards": ["h100"], **more}
    return asked(client, **body).json()["cards"][0]


def apart(plan: Plan, micro: int, spread_gib: float) -> Plan:
    """At that batch, with processes that differed by so much."""
    peak = plan.measured.peak.model_copy(update={"spread": round(spread_gib * GIB)})
    settings = plan.settings.model_copy(update={"batch": plan.settings.batch.model_copy(update={"micro": micro})})
    measured = plan.measured.model_copy(update={"peak": peak})
    return plan.model_copy(update={"measured": measured, "settings": settings})


@pytest.mark.parametrize(
    ("device", "spread_gib", "high_gib"),
    [
        ("NVIDIA L40S", 0.5, 16 + 2 * 16 * 0.5 / 8),
        ("NVIDIA L40S", 6.0, 16 + 2 * 16 * 0.1),  # a tenth at most: it was noisy
        ("AMD EPYC 7B13", 0.5, 16 * 1.03),
    ],
)
def test_what_runs_differ_by_at_one_batch_they_may_at_others(tmp_path, device, spread_gib, high_gib):
    """A sixteenth of 8 GiB on an L40S at 8 samples is a sixteenth of 16 GiB on an H100 at 64; not what a CPU's do."""
    other = apart(on(device, 8.0, 100.0), 8, spread_gib)
    with serving_plans(tmp_path / "state", on("NVIDIA H100", 16.0, 800.0), other) as (client, _, _):
        assert row_of(client)["high_bytes"] == pytest.approx(high_gib * GIB, abs=2)


def test_by_what_others_plans_differ_counts_for_who_may_see_them(tmp_path):
    """Where searches are private, only the asker's own say by what runs differ."""
    plans = on("NVIDIA H100", 16.0, 800.0), apart(on("NVIDIA L40S", 8.0, 100.0), 8, 0.5)
    for private, high_gib in ((False, 18.0), (True, 16 * 1.03)):
        with serving_plans(tmp_path / f"{private}", *plans, private=private) as (client, service, (_, other)):
            with service.database.writing() as connection:
                connection.execute(update(SEARCHES).where(SEARCHES.c.id == other).values(owner="ben"))
            assert row_of(client)["high_bytes"] == round(high_gib * GIB)


def test_a_plan_of_another_batch_does_not_answer(tmp_path):
    with serving_plans(tmp_path / "state", on("NVIDIA H100", 10.0, 800.0)) as (client, _, _):
        assert [row_of(client, batch=batch)["how"] for batch in (64, 32)] == ["measured", "unknown"]


def test_an_unknown_card_is_refused_in_words(tmp_path):
    with serving(tmp_path / "state") as (client, _):
        answer = asked(client, fingerprint=OTHER, cards=["h1000"])
    assert answer.status_code == 422
    assert (
        answer.json()["detail"] == "cards: no card is known as 'h1000'. The nearest: h100, h200, h100-nvl, a100-80gb."
    )


@pytest.mark.parametrize(
    "body",
    [
        {"cards": ["h100"]},
        {"cards": ["h100"], "fingerprint": OTHER, "archive": "0" * 64},
        {"cards": [], "fingerprint": OTHER},
        {"cards": ["h100"], "archive": "0" * 64, "task": "../model.py"},
        {"cards": ["h100"], "archive": "0" * 64},
    ],
)
def test_what_names_no_job_is_refused(tmp_path, body):
    with serving(tmp_path / "state") as (client, _):
        assert asked(client, **body).status_code == 422


def test_others_searches_do_not_count_where_searches_are_private(tmp_path):
    with serving_plans(tmp_path / "state", on("NVIDIA H100", 10.0, 8.0), private=True) as (client, service, _):
        other = bearer(service.tokens.create("ben", "submit", 3600.0)[1])
        for headers, how in ((None, "measured"), (other, "unknown")):
            body = {"fingerprint": FINGERPRINT, "cards": ["h100"]}
            answer = client.post("/v1/predict", json=body, headers=headers)
            assert answer.json()["cards"][0]["how"] == how


def test_who_only_reads_may_not_ask(tmp_path):
    with serving(tmp_path / "state") as (client, service):
        reader = bearer(service.tokens.create("ben", "read", 3600.0)[1])
        body = {"fingerprint": OTHER, "cards": ["h100"]}
        assert client.post("/v1/predict", json=body, headers=reader).status_code == 403


def estimate(gib: float) -> Estimate:
    """Of so much, within 10 %."""
    own = Fit(micro=8, accumulate=1, tensors=Interval.around(1, 0.0), process=Interval.around(round(gib * GIB), 0.1))
    rest = {"base_bytes": 1, "largest": own, "smallest": None, "surely": 32, "phase": "", "module": "", "fills": ()}
    return Estimate(how="traced", reference=own, seconds=1.0, **rest)


def test_old_predictions_are_forgotten(tmp_path):
    with serving(tmp_path / "state") as (_, service):
        folder = service.places.predictions
        kept = Predicted(fingerprint=OTHER, owner="ann", cards={"l40s": estimate(30.0)})
        Predictions(service.database, folder).keep(kept)
        forget_old(service, 3600.0)
        assert len([*folder.iterdir()]) == 1
        forget_old(service, -1.0)
        assert [*folder.iterdir()] == []


def program(folder: Path, text: str) -> tuple[str, ...]:
    """In place of autotune: prints this of an estimate, and where it ran."""
    path = folder / "program.py"
    path.write_text(f"import os, sys\nopen({str(folder / 'ran')!r}, 'w').write(os.getcwd())\n{text}\n")
    return sys.executable, str(path)


def test_an_archives_job_is_estimated_in_a_process_of_its_own_and_kept(tmp_path):
    """Its code is laid out for that process alone, and is gone afterwards; then its fingerprint is enough."""
    document = {"fingerprint": OTHER, "cards": [{"card": "l40s", "estimate": estimate(30.0).model_dump(mode="json")}]}
    command = program(tmp_path, f"print({json.dumps(json.dumps(document))})\nprint(sys.argv, file=sys.stderr)")
    with serving(tmp_path / "state", replace(OPTIONS, program=command)) as (client, _):
        sha256 = put(client, archive(model__py="")).json()["sha256"]
        first = asked(client, archive=sha256, cards=["L40S"])
        assert first.status_code == 200, first.text
        assert first.json()["fingerprint"] == OTHER
        row = asked(client, fingerprint=OTHER, cards=["l40s", "t4"], budget="32GiB").json()["cards"][0]
        assert first.json()["cards"][0]["fits"] is True
        assert (row["how"], row["batch"], row["fits"], row["high_bytes"]) == ("predicted", 8, False, round(33 * GIB))
        assert "at most one peak in twenty" in row["sure"]
        assert row["sure"].endswith("; batches of 32 fit the card's 45466 MiB")
        ran = Path((tmp_path / "ran").read_text())
        assert ran.is_relative_to(tmp_path / "state" / "searches")
        assert not ran.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('print(\'{"error": "model.py: there is no build_model", "kind": "TaskError"}\'); sys.exit(2)', "no build"),
        ("print('a'); sys.exit(0)", "no estimate that can be read"),
        ("sys.exit('gone')", "gone"),
    ],
)
def test_a_job_that_cannot_be_estimated_is_refused_in_its_words(tmp_path, text, said):
    with serving(tmp_path / "state", replace(OPTIONS, program=program(tmp_path, text))) as (client, _):
        sha256 = put(client, archive(model__py="")).json()["sha256"]
        answer = asked(client, archive=sha256, cards=["l40s"])
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


def test_an_archive_that_is_anothers_is_not_run(tmp_path):
    with serving(tmp_path / "state") as (client, service):
        sha256 = put(client, archive(model__py="print()")).json()["sha256"]
        other = bearer(service.tokens.create("ben", "submit", 3600.0)[1])
        answer = client.post("/v1/predict", json={"archive": sha256, "cards": ["l40s"]}, headers=other)
    assert answer.status_code == 422


ROWS = [
    {"card": "h100", "how": "measured", "fits": True, "high_bytes": 10 * GIB, "host_bytes": 2 * GIB},
    {"card": "l40s", "how": "predicted", "fits": True, "high_bytes": 11 * GIB, "host_bytes": None},
    {"card": "t4", "how": "predicted", "fits": False, "high_bytes": 30 * GIB, "host_bytes": None},
]


@pytest.fixture
def service(monkeypatch) -> Iterator[list[Any]]:
    """Stands in for a service: answers :data:`ROWS`, or the status that was put; what it was asked is kept."""
    seen: list[Any] = []
    monkeypatch.syspath_prepend(str(DEPLOY))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.path, self.headers["Authorization"], self._body()))
            known = seen[-1][2]["fingerprint"] == FINGERPRINT
            body = json.dumps({"cards": ROWS} if known else {"detail": "a fingerprint was expected"}).encode()
            self.send_response(200 if known else 422)
            self.end_headers()
            self.wfile.write(body)

        def _body(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AUTOTUNE_SERVER", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AUTOTUNE_TOKEN", "atn_1")
    yield seen
    server.shutdown()
    thread.join()
    server.server_close()


PRODUCTS = {"h100": "NVIDIA-H100-80GB-HBM3", "l40s": "NVIDIA-L40S", "t4": "Tesla-T4"}


def review(fingerprint: str | None = FINGERPRINT, **spec: Any) -> dict[str, Any]:
    notes = {} if fingerprint is None else {"autotune/fingerprint": fingerprint, "autotune/budget": "20GiB"}
    return {"request": {"uid": "1", "object": {"metadata": {"annotations": notes}, "spec": spec}}}


def test_the_webhook_lets_a_pod_go_to_nodes_whose_cards_it_fits(service):
    from admission_webhook import LABEL, reviewed

    found = reviewed(review(), PRODUCTS)["response"]
    affinity, why = json.loads(base64.b64decode(found["patch"]))
    (term,) = affinity["value"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    here = {"key": LABEL, "operator": "In", "values": [PRODUCTS["h100"], PRODUCTS["l40s"]]}
    assert (found["allowed"], found["patchType"], term) == (True, "JSONPatch", {"matchExpressions": [here]})
    assert (
        why["value"] == "h100: 10.00 GiB, measured; l40s: 11.00 GiB, predicted; t4: 30.00 GiB, predicted, does not fit"
    )
    body = {"fingerprint": FINGERPRINT, "cards": [*PRODUCTS], "budget": "20GiB"}
    assert service == [("/v1/predict", "Bearer atn_1", body)]


def test_the_webhook_keeps_what_a_pod_asks_of_nodes(service):
    from admission_webhook import reviewed

    own = {"key": "zone", "operator": "In", "values": ["a"]}
    of_nodes = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [own]}]}}
    found = reviewed(review(affinity={"nodeAffinity": of_nodes, "podAffinity": {}}), PRODUCTS)["response"]
    value = json.loads(base64.b64decode(found["patch"]))[0]["value"]
    (term,) = value["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0] == own
    assert len(term["matchExpressions"]) == 2
    assert "podAffinity" in value


def test_the_webhook_lets_every_pod_through(service, monkeypatch):
    """One that says nothing; one that nothing is known of; and any while the service does not answer."""
    from admission_webhook import reviewed

    assert reviewed(review(None), PRODUCTS)["response"] == {"uid": "1", "allowed": True}
    refused = reviewed(review(OTHER), PRODUCTS)["response"]
    assert refused == {"uid": "1", "allowed": True, "warnings": ["autotune: a fingerprint was expected"]}
    monkeypatch.setenv("AUTOTUNE_SERVER", "http://127.0.0.1:9")
    assert "does not answer" in reviewed(review(), PRODUCTS)["response"]["warnings"][0]


def test_the_webhook_answers_over_http_and_refuses_what_is_no_review(service):
    import urllib.error
    import urllib.request

    from admission_webhook import handler

    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(PRODUCTS))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(review()).encode())) as answer:
            assert json.load(answer)["response"]["allowed"]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(url, b"[]"))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


JOB = f"#!/bin/bash\n#AUTOTUNE fingerprint={FINGERPRINT} budget=20GiB\npython train.py\n"


def test_the_filter_writes_the_cards_and_the_hosts_memory_into_a_script(service):
    from slurm_filter import filtered

    script, said = filtered(JOB, [*PRODUCTS])
    added = ["#SBATCH --constraint=h100|l40s", "#SBATCH --mem=2110M"]
    assert script.splitlines() == ["#!/bin/bash", *added, *JOB.splitlines()[1:]]
    assert said.startswith("autotune: h100: 10.00 GiB, measured")
    own = JOB.replace("python", "#SBATCH --mem=8G\npython")
    assert "--mem=2110M" not in filtered(own, [*PRODUCTS])[0]


def test_the_filter_leaves_a_script_as_it_is_that_nothing_is_known_of(service):
    from slurm_filter import filtered

    plain = "#!/bin/bash\npython train.py\n"
    assert filtered(plain, ["h100"]) == (plain, "")
    other = JOB.replace(FINGERPRINT, OTHER)
    assert filtered(other, ["h100"]) == (other, "autotune: a fingerprint was expected")
    assert len(service) == 1
