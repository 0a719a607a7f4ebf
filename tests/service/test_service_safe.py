"""Where the control plane listens, and which folders jobs may name."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from control_plane import enter, job_mapping
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from servers import free_ports
from waiting import eventually

from shoal_planner.errors import InvalidField
from shoal_service.app import create_app
from shoal_service.auth import admin_token
from shoal_service.errors import BadInput
from shoal_service.loopback import is_loopback
from shoal_service.places import Places
from shoal_service.settings import Settings
from shoal_service.submission import read_any_job

SERVE = [sys.executable, "-c", "from shoal.cli import main; main()", "serve"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_addresses_that_stay_on_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.evil"])
def test_addresses_that_do_not(host: str) -> None:
    assert not is_loopback(host)


def test_beyond_this_machine_only_with_tls_or_behind_a_proxy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"refuses to listen on 0\.0\.0\.0 without TLS"):
        create_app(Settings(data_dir=tmp_path, host="0.0.0.0"))
    with pytest.raises(ValueError, match="go together"):
        create_app(Settings(data_dir=tmp_path, tls_key=tmp_path / "key"))
    create_app(Settings(data_dir=tmp_path, host="0.0.0.0", behind_proxy=True))
    (tmp_path / "admin.token").write_text("correct horse battery\n")
    assert admin_token(tmp_path) == "correct horse battery"
    create_app(Settings(data_dir=tmp_path))
    with pytest.raises(ValueError, match="can be guessed"):
        create_app(Settings(data_dir=tmp_path, host="0.0.0.0", behind_proxy=True))


def test_serve_says_why_it_does_not_start(tmp_path: Path) -> None:
    command = [*SERVE, "--host", "0.0.0.0", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("shoal: refuses to listen on 0.0.0.0 without TLS") and "--behind-proxy" in done.stderr


def test_serve_speaks_https(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    port = free_ports(1)[0]
    options = ["--host", "0.0.0.0", "--port", str(port), "--data-dir", str(tmp_path), "--file-roots", "/nowhere"]
    with (tmp_path / "log").open("wb") as log:
        files = ["--tls-cert", str(certificate), "--tls-key", str(key)]
        process = subprocess.Popen([*SERVE, *options, *files], stdout=log, stderr=log)
    try:
        trusting = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return httpx.get(f"{url}/healthz", verify=trusting).is_success
            except httpx.TransportError:
                return False

        eventually(answers, 60)
        token = (tmp_path / "admin.token").read_text().strip()
        with httpx.Client(base_url=url, verify=trusting, headers={"Authorization": f"Bearer {token}"}) as client:
            link = client.post("/v1/login-links").json()["url"]
            assert link.startswith("https://")
            assert "Secure" in enter(client, link).headers["set-cookie"]
            refused = client.post("/v1/jobs", json=job_mapping(checkpoint={"uri": f"file://{tmp_path}"}))
            assert (refused.status_code, refused.json()["param"]) == (422, "checkpoint.uri")
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0


def _certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, key_file = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    no_password = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, no_password))
    return certificate, key_file


JOBS = {
    "data.uri": lambda place: {"data": {"uri": place}},
    "data.mix[1].uri": lambda place: {"data": {"mix": [{"uri": "stdlib:"}, {"uri": place}]}},
    "data.eval_uri": lambda place: {"data": {"eval_uri": place}},
    "data.tokenizer": lambda place: {"data": {"tokenizer": place.removeprefix("file://")}},
    "model.hf": lambda place: {"model": {"hf": place}},
    "train.init_from": lambda place: {"train": {"init_from": place}},
    "checkpoint.uri": lambda place: {"checkpoint": {"uri": place}},
    "code.working_dir": lambda place: {"code": {"working_dir": place}},
    "code.py_modules[0]": lambda place: {"code": {"py_modules": [place]}},
    "script.working_dir": lambda place: {"script": {"working_dir": place}},
    "track.tensorboard.log_dir": lambda place: {"track": {"tensorboard": {"log_dir": place}}},
    "track.wandb.dir": lambda place: {"track": {"wandb": {"dir": place.removeprefix("file://")}}},
}

PATHS_TOO = ("data.uri", "data.mix[1].uri", "data.eval_uri", "data.tokenizer", "model.hf")


def test_an_id_of_the_hub_is_told_so_where_no_folders_are_allowed(tmp_path: Path) -> None:
    job = {"name": "a", "model": {"hf": "meta-llama/Llama-3.1-8B"}}
    with pytest.raises(BadInput, match=r"`hf download meta-llama/Llama-3.1-8B --local-dir FOLDER` fetches it"):
        asyncio.run(read_any_job(job, 1.0, Places(roots=())))


@pytest.mark.parametrize("field", sorted(JOBS))
def test_jobs_name_places_below_the_operators_folders_alone(tmp_path: Path, field: str) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    for folder in (allowed, secret):
        (folder / "inside").mkdir(parents=True)
    (allowed / "escape").symlink_to(secret)
    (allowed / "circle").symlink_to(allowed / "circle")
    (allowed / "near").symlink_to(allowed / "inside")
    places = Places(roots=(allowed,))
    for good in (allowed, allowed / "inside", allowed / "new/deep", allowed / "near/x"):
        places.check(JOBS[field](f"file://{good}"))
    bad = [secret, tmp_path, Path("/etc/passwd"), allowed / "escape", allowed / "escape/inside", Path(f"{allowed}x")]
    for place in (*map(str, bad), f"{allowed}/../secret", f"{allowed}/inside/../../secret/x"):
        for said in (f"file://{place}", *([place] if field in PATHS_TOO else [])):
            with pytest.raises(InvalidField) as caught:
                places.check(JOBS[field](said))
            assert caught.value.field == field
        with pytest.raises(InvalidField, match="its operator lists those in SHOAL_FILE_ROOTS"):
            Places(roots=()).check(JOBS[field](f"file://{place}"))
        Places(roots=(Path("/"),)).check(JOBS[field](f"file://{place}"))


@pytest.mark.parametrize("form", ["{}", "file://{}", "FILE://{}", "file://localhost{}"])
@pytest.mark.parametrize("section", [("data", "tokenizer"), ("model", "hf")])
def test_paths_and_uris_of_them_are_looked_at_alike(tmp_path: Path, section: tuple[str, str], form: str) -> None:
    outer, name = section
    places = Places(roots=(tmp_path,))
    places.check({outer: {name: form.format(tmp_path / "x")}})
    for bad in ("/etc/passwd", f"{tmp_path}/../secret", f"{tmp_path}x"):
        with pytest.raises(InvalidField, match=rf"{outer}\.{name}"):
            places.check({outer: {name: form.format(bad)}})
    with pytest.raises(InvalidField, match=rf"{outer}\.{name}"):
        places.check({outer: {name: "etc/passwd"}})


def test_other_ways_to_write_a_place_are_the_same_place(tmp_path: Path) -> None:
    places = Places(roots=(tmp_path,))
    for uri in (
        f"file://{tmp_path}/%2e%2e/x",
        f"FILE://{tmp_path}/../x",
        "file:/etc/passwd",
        "file://localhost/etc/passwd",
        "file://elsewhere/etc",
        f"file://{tmp_path}/a%00b",
        "file:etc",
    ):
        with pytest.raises(InvalidField, match=r"data\.uri"):
            places.check({"data": {"uri": uri}})
    with pytest.raises(InvalidField):
        places.check({"track": {"mlflow": {"tracking_uri": "sqlite:////etc/mlflow.db"}}})
    for fine in (
        {"data": {"uri": "stdlib:", "tokenizer": "bytes"}},
        {"checkpoint": {"uri": "s3://bucket/etc"}},
        [],
        None,
    ):
        places.check(fine)
    places.check({"code": {"env": {"WHERE": "file:///etc"}}})  # what a user's own code is told is not opened by us
