"""What messages quote of values that may be, or hold, a secret."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_planner.errors import InvalidField, NotADocument, show
from shoal_planner.job import parse_job
from shoal_planner.secrecy import concealed_text, hides, looks_secret

SECRET = "hunter2secret"
JOB: dict[str, Any] = {
    "name": "tiny",
    "model": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 172, "vocab": 256},
    "data": {"uri": "stdlib:"},
    "train": {"global_batch": 8, "seq_len": 32, "steps": 60},
}


@pytest.mark.parametrize(
    "name",
    [
        "API_KEY",
        "api_key",
        "apiKey",
        "api-key",
        "DB_PASSWORD",
        "AWS_ACCESS_KEY_ID",
        "accessToken",
        "client_secret",
        "Cookie",
    ],
)
def test_names_that_mean_secrets(name: str) -> None:
    assert looks_secret(name) and hides(f"a.{name}") and hides(f"{name}[0].b")


@pytest.mark.parametrize(
    "name", ["end_token", "max_tokens", "tokens_per_s", "Idempotency-Key", "key", "monkey", "keep"]
)
def test_names_that_do_not(name: str) -> None:
    assert not looks_secret(name) and not hides(f"train.{name}")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (f"https://me:{SECRET}@mlflow.example/x", "'https://...@mlflow.example/x'"),
        (f"https://{SECRET}@mlflow.example", "'https://...@mlflow.example'"),
        (f"s3://AKIAX:{SECRET}/a+b@bucket/x", "'s3://...@bucket/x'"),
        (f"me:{SECRET}@mlflow.example", "'...@mlflow.example'"),
        (f"git+https://me:{SECRET}@git.example/x.git", "'git+https://...@git.example/x.git'"),
        (f"https://store.example/x?X-Amz-Signature={SECRET}&part=1", "'https://store.example/x?...'"),
        (f"https://store.example/x#access_token={SECRET}", "'https://store.example/x#...'"),
        ({"API_KEY": SECRET, "LEVEL": 3}, "{'API_KEY': '...', 'LEVEL': 3}"),
        (
            {"env": {"ANY": SECRET}, "pip": [f"https://x/?{SECRET}"]},
            "{'env': {'ANY': '...'}, 'pip': ['https://x/?...']}",
        ),
        ({"password": [SECRET, {"a": SECRET}], "token": None}, "{'password': '...', 'token': None}"),
        ((f"https://a:{SECRET}@b", 1), "('https://...@b', 1)"),
        ("s3://bucket/run@v1", "'s3://bucket/run@v1'"),
        ("https://mlflow.example:5000/a", "'https://mlflow.example:5000/a'"),
        ("ops@example.org", "'ops@example.org'"),
        ("what? nothing", "'what? nothing'"),
    ],
)
def test_values_as_they_are_quoted(value: object, shown: str) -> None:
    assert show(value) == shown


def test_what_is_quoted_besides_is_looked_at_too() -> None:
    error = InvalidField("data.uri", "x", f"is not https://me:{SECRET}@host/?sig={SECRET}")
    assert str(error) == "data.uri = 'x': is not https://...@host/?..."
    assert SECRET not in str(NotADocument("job", "x", f"is no more than {show(f'https://a:{SECRET}@b')}"))
    assert str(InvalidField("api_key", None, "is required")) == "api_key = None: is required"


@pytest.mark.parametrize(
    "given",
    [
        {"code": {"env": {"API_KEY": SECRET}}},
        {"code": {"env": {"ANY_NAME": SECRET}}},
        {"code": {"env": {"API_KEY": [SECRET]}}},
        {"code": {"secrets": {"X": f"{SECRET} value"}}},
        {"code": {"working_dir": f"ftp://me:{SECRET}@host/x.zip"}},
        {"api_key": SECRET},
        {"model": {**JOB["model"], "hf_token": SECRET}},
        {"track": {"mlflow": f"https://me:{SECRET}@mlflow.example"}},
        {"track": {"mlflow": {"tracking_uri": f"ftp://me:{SECRET}@mlflow.example"}}},
        {"track": {"mlflow": {"tracking_uri": f"ftp://mlflow.example/?sig={SECRET}"}}},
        {"data": {"uri": f"ftp://x/y?X-Amz-Signature={SECRET}"}},
        {"data": f"https://x/y?sig={SECRET}"},
        {"train": {**JOB["train"], "init_from": f"https://x/?sig={SECRET}"}},
        {"checkpoint": {"uri": f"https://me:{SECRET}@host"}},
    ],
)
def test_a_job_that_is_refused_does_not_say_what_is_secret_in_it(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as refused:
        parse_job({**JOB, **given})
    assert SECRET not in str(refused.value)
    assert refused.value.field in str(refused.value)


@pytest.mark.parametrize("piece", ["0", ":", "://", "a:", "@", "://a@", "?", "://?", "a:b@", "a/b"])
def test_a_refusal_of_megabytes_is_said_at_once(piece: str) -> None:
    """Nobody may keep the control plane busy with a long text: looking at each character from each other one would take
    hours."""
    text = piece * (1_000_000 // len(piece))
    found = concealed_text(f"{text} https://me:{SECRET}@host/?sig={SECRET} {text}")
    assert SECRET not in found and "https://...@host/?..." in found
    assert len(show({"key": [text, text]})) < 1000
