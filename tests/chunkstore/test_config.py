"""Configuration files: what is wrong is named, with its path, its value and what is allowed."""

import contextlib
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from chunkstore.config import load_config, parse_config
from chunkstore.errors import ConfigError
from chunkstore.open import StoreConfig


class Engine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["torch", "sglang"]
    port: int = Field(default=30000, ge=1, le=65535)
    token: SecretStr | None = None

    @field_validator("port")
    @classmethod
    def _odd(cls, port: int) -> int:
        if port == 13:
            raise ValueError("13 is taken")
        return port


class Daemon(BaseModel):
    model_config = ConfigDict(extra="forbid")

    store: StoreConfig
    engines: list[Engine] = []
    spare: Engine | None = None
    labels: dict[str, int] = {}


GOOD = """
store:
  url: s3://bucket/runs/1
  concurrency: 4
engines:
  - kind: torch
    port: "${TEST_PORT}"
spare: {kind: sglang, token: "Bearer ${TEST_TOKEN}${TEST_EMPTY}"}
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PORT", "8000")
    monkeypatch.setenv("TEST_TOKEN", "se${cret")
    monkeypatch.setenv("TEST_EMPTY", "")


def load(tmp_path: Path, text: str) -> Daemon:
    path = tmp_path / "daemon.yaml"
    path.write_text(text)
    return load_config(path, Daemon)


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return caught.value.message.removeprefix(f"{tmp_path}/")


@pytest.mark.usefixtures("environment")
def test_a_good_file_with_values_from_the_environment(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.store == StoreConfig(url="s3://bucket/runs/1", concurrency=4)
    assert config.engines == [Engine(kind="torch", port=8000)]
    assert config.spare is not None
    assert config.spare.token is not None
    # What a variable holds is data: it is not searched for variables again.
    assert config.spare.token.get_secret_value() == "Bearer se${cret"


def test_all_wrong_keys_are_listed_at_once(tmp_path: Path) -> None:
    message = refused(
        tmp_path,
        """
store: {url: /tmp/x, concurency: 3, read_timeout: fast}
engines:
  - {kind: torch}
  - {kind: vllm, port: 0}
  - {port: 13}
spare: {kind: torch, prot: 1}
labels: {a: one}
extra: 1
""",
    )
    assert message.splitlines() == [
        "daemon.yaml: 9 wrong keys",
        "  store.read_timeout: 'fast': input should be a valid number, unable to parse string as a number",
        "  store.concurency: 3: unknown key; did you mean 'concurrency'? allowed: concurrency, connect_timeout, "
        "endpoint_url, path_style, read_timeout, region, retry_deadline, url",
        "  engines[1].kind: 'vllm': input should be 'torch' or 'sglang'",
        "  engines[1].port: 0: input should be greater than or equal to 1",
        "  engines[2].kind: is required",
        "  engines[2].port: 13: 13 is taken",
        "  spare.prot: 1: unknown key; did you mean 'port'? allowed: kind, port, token",
        "  labels.a: 'one': input should be a valid integer, unable to parse string as an integer",
        "  extra: 1: unknown key; allowed: engines, labels, spare, store",
    ]


def test_rules_over_several_keys_name_them(tmp_path: Path) -> None:
    message = refused(tmp_path, "store: {url: /tmp/x, region: r}")
    assert "store: " in message
    assert "region: only for s3:// URLs" in message


def test_a_value_from_the_environment_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PASSWORD", "hunter2")
    message = refused(tmp_path, 'store: {url: /tmp/x, concurrency: "${TEST_PASSWORD}"}')
    assert "store.concurrency: '${TEST_PASSWORD}': " in message
    assert "hunter2" not in message


def test_no_line_shows_what_may_be_secret() -> None:
    spare = {"kind": "torch", "token": ["hunter2"], "tokn": "hunter2", "more": {"of": "hunter2"}, "port": 13}
    config = {
        "store": {"url": "s3://me:hunter2@bucket/x"},
        "engines": {"token": "hunter2"},
        "spare": spare,
        "servers": [{"token": "hunter2"}],
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(config, Daemon, source="it")
    assert "hunter2" not in str(caught.value)
    for place in ("store: ", "engines: ", "spare.token: ", "spare.tokn: ", "spare.more: ", "servers: "):
        assert f"\n  {place}" in caught.value.message

    class Server(BaseModel):
        url: Literal["http://a"]

    with pytest.raises(ConfigError) as caught:
        parse_config({"url": "http://me:hunter2@b"}, Server, source="it")
    assert "url: 'http://…@b': " in caught.value.message


def test_allowed_keys_are_told_once_per_place(tmp_path: Path) -> None:
    message = refused(tmp_path, "store: {url: /tmp/x, concurency: 3, b: 1}\nextra: 1\nmore: 2\n")
    assert message.count("allowed: concurrency, ") == 1
    assert message.count("allowed: engines, labels, spare, store") == 1
    assert "  store.b: 1: unknown key\n" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "store: {url: '${TEST_UNSET}'}",
            "daemon.yaml: store.url: the environment variable 'TEST_UNSET' is not set",
        ),
        ("engines: [{kind: '${}'}]", "daemon.yaml: engines[0].kind: the environment variable '' is not set"),
        ("store:\n  url: a\n  url: b\n", "daemon.yaml:3:3: key 'url' is given twice"),
        ("store: {url: a}\nstore: {url: b}\n", "daemon.yaml:2:1: key 'store' is given twice"),
        ("1: x\n", "daemon.yaml:1:1: key 1 is not a string"),
        ("[1]: x\n", "daemon.yaml:1:1: key [1] is not a string"),
        ("{a: 1}: x\n", "daemon.yaml:1:1: key {'a': 1} is not a string"),
        ("store: [\n", "daemon.yaml:2:1: expected the node content, but found '<stream end>'"),
        (
            "store: !!python/object/apply:os.system ['true']\n",
            "daemon.yaml:1:8: could not determine a constructor",
        ),
        ("- a\n", "daemon.yaml: is ['a'], but has to be keys and values"),
        ("a\0b", "daemon.yaml: is not YAML"),
        ("", "daemon.yaml: 1 wrong key\n  store: is required"),
    ],
)
def test_what_is_not_a_config_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert refused(tmp_path, text).startswith(message)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load_config(tmp_path / "absent.yaml", Daemon)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read"):
        load_config(tmp_path / "binary.yaml", Daemon)


def test_plain_values_are_checked_the_same_way() -> None:
    assert parse_config({"url": "/tmp/x"}, StoreConfig, source="config").url == "/tmp/x"
    with pytest.raises(ConfigError, match=r"config: 1 wrong key\n  ulr: .*did you mean 'url'"):
        parse_config({"ulr": "/tmp/x", "url": "y"}, StoreConfig, source="config")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["store", "engines", "spare", "labels", "url", "kind", "port", "token", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(plain)
def test_no_values_raise_anything_but_a_config_error(data: object) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_config(data, Daemon, source="x"), Daemon)
