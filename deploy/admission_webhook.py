"""A mutating admission webhook for Kubernetes: asks a service on which types of cards a pod's job fits, and lets the
pod go to nodes with such cards alone.

    python admission_webhook.py --cards cards.json --certificate tls.crt --key tls.key

A pod says what it trains in an annotation, `autotune/fingerprint: sha256:…`, as its plan has it, and what it may take
in `autotune/budget: 20GiB`. cards.json names the cluster's cards, and their nodes' `nvidia.com/gpu.product`:
`{"h100": "NVIDIA-H100-80GB-HBM3", "l40s": "NVIDIA-L40S"}`. Where nothing is known, or the service does not answer, the
pod goes through as it is, with a warning. Register it (MutatingWebhookConfiguration, pods, CREATE) with
`failurePolicy: Ignore` and `timeoutSeconds: 10`.
"""

from __future__ import annotations

import argparse
import base64
import json
import ssl
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from placement import NoAnswer, ask, words

LABEL = "nvidia.com/gpu.product"
MOST_BYTES = 4 * 2**20


def reviewed(review: dict[str, Any], products: Mapping[str, str]) -> dict[str, Any]:
    """The answer to an AdmissionReview (admission.k8s.io/v1): always allowed."""
    request = review["request"]
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    pod = request.get("object") or {}
    notes = (pod.get("metadata") or {}).get("annotations") or {}
    if fingerprint := notes.get("autotune/fingerprint"):
        try:
            rows = ask(fingerprint, list(products), notes.get("autotune/budget"))
            said = "; ".join(map(words, rows))
            if fitting := [row for row in rows if row["fits"]]:
                patch = json.dumps(patched(pod, [products[row["card"]] for row in fitting], said)).encode()
                response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
            else:
                response["warnings"] = [f"autotune: fits no card that is known of: {said}"]
        except NoAnswer as reason:
            response["warnings"] = [str(reason)]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def patched(pod: dict[str, Any], products: list[str], said: str) -> list[dict[str, Any]]:
    """A JSON patch: nodes with these cards, beside what the pod asks of nodes already; and why, as an annotation."""
    here = {"key": LABEL, "operator": "In", "values": products}
    affinity: dict[str, Any] = dict((pod.get("spec") or {}).get("affinity") or {})
    of_nodes: dict[str, Any] = dict(affinity.get("nodeAffinity") or {})
    required = of_nodes.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), here]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    of_nodes["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    return [
        {"op": "add", "path": "/spec/affinity", "value": {**affinity, "nodeAffinity": of_nodes}},
        {"op": "add", "path": "/metadata/annotations/autotune~1predicted", "value": said},
    ]


def handler(products: Mapping[str, str]) -> type[BaseHTTPRequestHandler]:
    """Answers reviews."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                size = int(self.headers.get("Content-Length", 0))
                answer = reviewed(json.loads(self.rfile.read(min(size, MOST_BYTES))), products)
            except (ValueError, KeyError, TypeError, AttributeError):
                self.send_error(400, "an AdmissionReview was expected")
                return
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing for each pod."""

    return Handler


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=Path, required=True)
    parser.add_argument("--certificate", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--port", type=int, default=8443)
    arguments = parser.parse_args()
    server = ThreadingHTTPServer(("", arguments.port), handler(json.loads(arguments.cards.read_text())))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(arguments.certificate, arguments.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
