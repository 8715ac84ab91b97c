"""Behind a proxy: what it says is taken from it alone, and the files of deploy/ make it say that."""

from __future__ import annotations

import ipaddress
import random
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from service_runs import OPTIONS, free_port, listening

from autotune.service.client import Client
from autotune.service.service import open_service
from autotune.service.web.app import make_app
from autotune.service.web.limits import BoundedProtocol

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = "autotune.example.com"
SAID = {"X-Forwarded-Host": NAME, "X-Forwarded-Proto": "https", "X-Forwarded-For": "198.51.100.1, 203.0.113.9"}
ORIGIN = {"Origin": f"https://{NAME}", "Sec-Fetch-Site": "same-origin"}


def sign_in(client: Any, token: str, **more: str) -> httpx.Response:
    return client.post("/session", json={"token": token}, headers=ORIGIN | more)


def test_what_a_proxy_says_is_taken_from_its_address_alone(tmp_path, caplog):
    """With its word the page signs in, by a cookie for HTTPS alone, and the log has the client; from any other address,
    or without the option, the same words change nothing, and the refusal says what to do."""
    service = open_service(tmp_path / "state", None, OPTIONS)
    token = service.tokens.make_for_run()
    try:
        for behind, peer, is_taken in (
            ("127.0.0.1", "127.0.0.1", True),
            ("127.0.0.1", "::ffff:127.0.0.1", True),
            ("10.0.0.0/8", "10.9.9.9", True),
            ("10.0.0.0/8", "127.0.0.1", False),
            ("127.0.0.1", "unix", False),
            (None, "127.0.0.1", False),
        ):
            app = make_app(service, behind=behind and ipaddress.ip_network(behind))
            client = TestClient(app, base_url="http://127.0.0.1:8470", client=(peer, 1))
            with caplog.at_level("INFO"):
                answer = sign_in(client, token, **SAID)
            where = (behind, peer, answer.text)
            assert (answer.status_code == 204) == is_taken, where
            said = f"{'203.0.113.9' if is_taken else peer} POST /session {answer.status_code} "
            assert [each for each in caplog.messages if each.startswith(said)], where
            caplog.clear()
            if is_taken:
                assert "; Secure" in answer.headers["set-cookie"], where
                assert sign_in(client, token, **SAID | {"X-Forwarded-Proto": "http"}).status_code == 403
                assert sign_in(client, token, **SAID | {"X-Forwarded-Host": "other.example"}).status_code == 403
                assert sign_in(client, token, **SAID | {"X-Forwarded-For": "a\tb"}).status_code == 204
            else:
                assert "--behind-proxy" in answer.json()["detail"], where
    finally:
        service.close()


@pytest.mark.parametrize("proxy", ["much", "127.0.0.1:80", "10.0.0.1/8"])
def test_a_proxy_has_an_address(here, tmp_path, proxy):
    ended = here("serve", "--behind-proxy", proxy, "--state", "s", "--executor", "local", cwd=tmp_path)
    assert (ended.returncode, ended.stderr.startswith(f"--behind-proxy {proxy}: ")) == (2, True)


def nginx(folder: Path, port: int, upstream: int) -> list[str]:
    """Its command, with what the file names elsewhere here."""
    own = (DEPLOY / "nginx.conf").read_text().replace("listen 443", f"listen 127.0.0.1:{port}")
    own = own.replace("127.0.0.1:8470", f"127.0.0.1:{upstream}")
    own = own.replace("/etc/ssl/certs/autotune.pem", f"{folder}/cert.pem")
    own = own.replace("/etc/ssl/private/autotune.key", f"{folder}/key.pem")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}{own}\n}}\n"
    )
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]


def caddy(folder: Path, port: int, upstream: int) -> list[str]:
    """The same, with a certificate that is made here: one is got for a name that leads to it alone."""
    own = (DEPLOY / "Caddyfile").read_text().replace("127.0.0.1:8470", f"127.0.0.1:{upstream}")
    own = own.replace(
        f"{NAME} {{", f"https://{NAME}:{port} {{\n\tbind 127.0.0.1\n\ttls {folder}/cert.pem {folder}/key.pem"
    )
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{own}")
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@pytest.mark.medium
@pytest.mark.parametrize("proxy", [nginx, caddy], ids=lambda proxy: proxy.__name__)
def test_the_page_and_the_commands_work_through_the_proxies_of_the_examples(tmp_path, monkeypatch, proxy):
    """Sign-in by a secure cookie, a change by it, an archive above nginx's own limit, a stream; what a client says of
    itself is not believed; who is not signed in is refused, through the proxy as before it."""
    if not shutil.which(proxy.__name__) or not shutil.which("openssl"):
        pytest.skip(f"{proxy.__name__} or openssl is not installed")
    name = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1"]
    made = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *name, *made],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    service = open_service(tmp_path / "state", None, OPTIONS)
    token, port = service.tokens.make_for_run(), free_port()
    app = make_app(service, behind=ipaddress.ip_network("127.0.0.1"))
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    host = f"{NAME}:{port}"
    with listening(app, http=BoundedProtocol) as upstream:
        process = subprocess.Popen(proxy(tmp_path, port, upstream), stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=600) as client:
                until_there(port, process)
                ask = {"extensions": {"sni_hostname": NAME}}
                client.headers["Host"] = host
                said = {"X-Forwarded-Host": "evil.example", "X-Forwarded-For": "198.51.100.1", "X-Real-IP": "127.0.0.1"}
                assert client.get("/v1/searches", headers=said, **ask).status_code == 401
                assert (
                    client.get("/v1/searches", headers={**said, "X-Forwarded-Proto": "http"}, **ask).status_code == 401
                )
                evil = {"Origin": "https://evil.example"}
                assert client.post("/session", json={"token": token}, headers=said | evil, **ask).status_code == 403
                own = {"Origin": f"https://{host}"}
                answer = client.post("/session", json={"token": token}, headers=own, **ask)
                assert (answer.status_code, "; Secure" in answer.headers["set-cookie"]) == (204, True)
                cookie = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
                body = {"name": "ann", "role": "read"}
                for origin, status in ((evil, 403), (own, 201)):
                    answer = client.post("/v1/tokens", json=body, headers=cookie | origin, **ask)
                    assert answer.status_code == status, answer.text

            (tmp_path / "job").mkdir()
            (tmp_path / "job" / "data").write_bytes(random.Random(0).randbytes(3 * 2**20))
            (tmp_path / "job" / "model.py").write_text('{"trials": 2}')
            passed_on = Through(trusted)
            with Client(f"https://127.0.0.1:{port}", token, transport=passed_on) as commands:
                search_id = commands.submit(tmp_path / "job", task="model.py")["id"]
                assert [each["data"].get("state") for each in commands.events(search_id)][-1] == "SUCCEEDED"
        finally:
            process.terminate()
            process.wait()


class Through(httpx.HTTPTransport):
    """To a proxy by its address, as to its name."""

    def __init__(self, trusted: ssl.SSLContext) -> None:
        super().__init__(verify=trusted)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["sni_hostname"] = NAME
        request.headers["Host"] = f"{NAME}:{request.url.port}"
        return super().handle_request(request)


def until_there(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            continue
