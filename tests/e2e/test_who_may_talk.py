"""A deployment with every lock on: keys between processes, TLS and an API key before them."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
import zmq.auth
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.e2e.cases import CHAT, shown, user
from tests.e2e.fleet import MODEL, Deployment, Frontend
from tests.e2e.pictures import pattern
from transfer.access import make_keys
from transfer.messages import PROTOCOL_VERSION, Hello, Ping, encode

API_KEY = "not-for-everybody"
PER_WORKER = 2
WORKERS = 2


@dataclass
class Locked:
    deployment: Deployment
    frontend: Frontend
    certificate: Path

    def everything_said(self) -> str:
        """All logs, metrics and what the fleet endpoint shows."""
        logs = "".join(p.log.read_text(errors="replace") for p in self.deployment.processes)
        http = self.frontend.http
        return logs + http.get("/metrics").text + http.get("/v1/fleet").text


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "frontend")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    paths = directory / "certificate.pem", directory / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(pem))
    paths[1].write_bytes(
        key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths


@pytest.fixture(scope="module")
def locked(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    deployment = Deployment(checkpoint, tmp_path_factory.mktemp("locked-logs"), "locked")
    try:
        keys = deployment.directory / "keys"
        make_keys(keys)
        certificate, key = make_certificate(deployment.directory)
        deployment.start_worker(
            "--engine", "mock", "--mock-workers", str(WORKERS), "--mock-speed", "2",
            "--host", "0.0.0.0", "--port", "0", "--secure-keys", str(keys),
            name="mock-worker",
        )
        frontend = deployment.start_frontend(
            "--secure-keys", str(keys), "--api-key", API_KEY,
            "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key),
            "--allowed-media-domains", "pictures.example",
            "--max-request-mb", "1", "--max-requests-per-worker", str(PER_WORKER),
            certificate=certificate, api_key=API_KEY,
        )
        deployment.await_ready([frontend], workers=WORKERS)
        yield Locked(deployment, frontend, certificate)
    except BaseException:
        print(deployment.last_lines())
        raise
    finally:
        deployment.end()


def chat(*parts: Any, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [user(*parts)], "max_tokens": 4, **options}


def test_with_key_and_certificate_a_picture_is_answered(locked: Locked) -> None:
    answer = locked.frontend.ask(CHAT, chat("What?", shown(pattern(200, 120))))
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/fleet", "/v1/completions"])
def test_without_the_api_key_nothing_is_answered(locked: Locked, path: str) -> None:
    method = "GET" if path in ("/v1/models", "/v1/fleet") else "POST"
    for header in ("", "Bearer", "Bearer wrong", f"Basic {API_KEY}"):
        response = locked.frontend.http.request(
            method, path, json={} if method == "POST" else None,
            headers={"Authorization": header},
        )
        assert response.status_code == 401, response.text


def test_health_needs_no_key(locked: Locked) -> None:
    response = locked.frontend.http.get("/health", headers={"Authorization": ""})
    assert response.status_code == 200


def test_clients_without_tls_are_not_spoken_to(locked: Locked) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(locked.frontend.url.replace("https", "http") + "/health", timeout=20)
    with pytest.raises(httpx.ConnectError):  # whose certificate is that?
        httpx.get(
            locked.frontend.url + "/health", timeout=20, verify=ssl.create_default_context()
        )


def test_media_come_from_allowed_domains_only(locked: Locked) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
    response = locked.frontend.http.post(CHAT, json=chat("What?", part))
    assert 400 <= response.status_code < 500
    assert "allowed domains" in response.text


def test_a_body_above_the_limit_is_refused(locked: Locked) -> None:
    response = locked.frontend.http.post(CHAT, json=chat("x" * (1 << 20)))
    assert response.status_code == 413
    locked.frontend.ask(CHAT, chat("x" * 1000))


def test_a_stranger_on_the_network_hears_nothing(locked: Locked) -> None:
    hello = Hello(
        frontend="stranger", protocol=PROTOCOL_VERSION, arena=None, transfer="inline",
        identity_seed_fingerprint="",
    )
    addresses = [worker["address"] for worker in locked.frontend.workers().values()]
    assert len(addresses) == WORKERS
    with zmq.Context() as context:
        for address in addresses:
            assert address.startswith("tcp://")
            with context.socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.setsockopt(zmq.ROUTING_ID, b"stranger")
                # Whoever notices first closes; the other one may see no more than that.
                refused = {
                    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
                }
                monitor = stranger.get_monitor_socket(
                    sum(refused) | zmq.EVENT_HANDSHAKE_SUCCEEDED
                )
                try:
                    stranger.connect(address)
                    for message in (hello, Ping()):
                        stranger.send_multipart(encode(message))
                    assert monitor.poll(20_000)
                    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
                    assert event in refused
                    assert not stranger.poll(100)
                finally:
                    stranger.disable_monitor()
                    monitor.close()
    assert locked.frontend.has_workers(WORKERS)


def test_more_than_the_fleet_takes_is_sent_away_and_nobody_else_waits(locked: Locked) -> None:
    def ask(number: int) -> httpx.Response:
        body = chat(f"Say {number}", max_tokens=60)
        return locked.frontend.http.post(CHAT, json=body)

    with ThreadPoolExecutor(20) as threads:
        asked = [threads.submit(ask, number) for number in range(20)]
        assert locked.frontend.http.get("/health").status_code == 200
        answers = [each.result() for each in asked]
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= PER_WORKER * WORKERS
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) > 0
            assert "try again" in answer.json()["error"]["message"]
    locked.frontend.ask(CHAT, chat("And now?"))
    refused = 'foveal_http_refused_total{reason="requests per worker"}'
    assert f"{refused} {statuses.count(429)}.0" in locked.frontend.http.get("/metrics").text


def test_secrets_are_told_to_nobody(locked: Locked) -> None:
    registry = locked.deployment.registry / "locked"
    seed_file = registry / "identity-seed"
    assert seed_file.stat().st_mode & 0o777 == 0o600
    assert registry.stat().st_mode & 0o777 == 0o700
    seed = seed_file.read_bytes()
    keys = locked.deployment.directory / "keys"
    secrets = [repr(seed)[2:-1], base64.b64encode(seed).decode(), seed.hex()]
    for path in keys.glob("*.key_secret"):
        _, secret = zmq.auth.load_certificate(path)
        assert secret is not None
        secrets.append(secret.decode())
    said = locked.everything_said()
    assert len(said) > 1000
    for secret in secrets:
        assert len(secret) >= 32 and secret not in said
    for process in locked.deployment.processes:
        for pid in process.family():
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("latin-1")
            assert not any(secret in arguments for secret in secrets)
