"""`deltasync check-config`: whose file it is, and whether it is right."""

import json
import traceback
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from chunkstore.config import parse_config
from chunkstore.errors import ConfigError
from chunkstore.open import StoreConfig
from deltasync.cli import main
from manifest.key_files import SigningConfig
from publisher.config import PublisherConfig
from subscriber.config import SubscriberConfig

PUBLISHER = "store: {url: /data/stream}\nbase_checkpoint: /models/m\n"
SUBSCRIBER = "store: {url: /data/stream}\nid: rollout-1\nengine: {type: torch, factory: 'mine:build'}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.yaml"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (PUBLISHER, "publisher"),
        ("store: {url: /data}\ninference_dtype: bfloat16\n", "publisher"),
        (SUBSCRIBER, "subscriber"),
        ("store: {url: /data}\npoll_interval: 2\n", "subscriber"),
        (SUBSCRIBER + "base_checkpoint: /models/m\n", "subscriber"),
    ],
)
def test_the_keys_tell_whose_file_it_is(
    file: Path, text: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["check-config", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok, checked as a {kind}'s config\n"


def test_json_has_the_defaults(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(SUBSCRIBER)
    assert main(["check-config", str(file), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["kind"] == "subscriber"
    assert (seen["config"]["id"], seen["config"]["poll_interval"]) == ("rollout-1", 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PUBLISHER + "detekt: snapshot\n", "detekt: 'snapshot': unknown key; did you mean 'detect'?"),
        (PUBLISHER + "upload_threads: 0\n", "upload_threads: 0: "),
        (SUBSCRIBER + "http: {prot: 1}\n", "http.prot: 1: unknown key; did you mean 'port'?"),
        (SUBSCRIBER + "id: again\n", "key 'id' is given twice"),
        ("store: {url: /data}\nbase_checkpont: /m\n", "base_checkpont: '/m': unknown key; did you mean"),
        ("store: {url: /data}\nstatedir: /m\n", "statedir: '/m': unknown key; did you mean 'state_dir'?"),
        ("store: {url: 'gs://b/x'}\ninference_dtype: bfloat16\n", "store: url: 'gs://b/x': publishers need"),
        ("engine: {type: torch, factory: 'mine:build'}\n", "store: is required"),
    ],
)
def test_wrong_keys_are_named(
    file: Path, text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["check-config", str(file)]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"error[config]: {file}")
    assert expected in stderr


@pytest.mark.parametrize(
    "text",
    ["store: {url: /data}\n", PUBLISHER + "refer_to_base: true\nengine: {type: torch, factory: 'm:f'}\n", ""],
)
def test_a_file_of_neither_or_both_needs_a_kind(
    file: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["check-config", str(file)]) == 1
    assert "cannot tell whether this is a publisher's or a subscriber's config" in capsys.readouterr().err


def test_the_kind_can_be_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("store: {url: /data}\n")
    assert main(["check-config", "--kind", "subscriber", str(file)]) == 0
    assert main(["check-config", "--kind", "publisher", str(file)]) == 1
    assert "base_checkpoint" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", str(tmp_path / "none.yaml")]) == 1
    assert capsys.readouterr().err.startswith("error[config]: ")


WRONG_FORMS = """\
store: s3://bucket/prefix
id: a b
http: 8080
trust: {keys: /etc/key.pub, stream: that one}
engine: {type: sglang, servers: ["http://127.0.0.1:30000"]}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            WRONG_FORMS,
            [
                "store: 's3://bucket/prefix': has to be keys and values; allowed: concurrency, connect_timeout, "
                "endpoint_url, path_style, read_timeout, region, retry_deadline, url",
                "id: 'a b': has to be at most 100 letters, digits, '.', '_' and '-', the first of them no '.'",
                "http: 8080: has to be keys and values; allowed: host, port",
                "engine.servers[0]: 'http://127.0.0.1:30000': has to be keys and values; allowed: name, url",
                "trust.keys: '/etc/key.pub': has to be a list",
                "trust.stream: 'that one': has to be the 32 hex digits that `deltasync status` prints",
            ],
        ),
        (
            "store: {url: /x}\nengine: {type: vllm}\n",
            ["engine.type: 'vllm': has to be one of 'torch', 'sglang'"],
        ),
        (
            "store: {url: /x}\nengine: {type: torch, factory: mine.build}\n",
            ["engine.factory: 'mine.build': has to be module:function, such as my_rollout:build_model"],
        ),
        (
            "store: {url: /x}\nengine: {type: sglang, servers: []}\n",
            ["engine.servers: []: has to have at least one item"],
        ),
        (
            "store: {url: /x}\nengine: {type: sglang, servers: [{url: 'host:1'}]}\n",
            ["engine.servers[0].url: 'host:1': has to be http://host:port or https://host:port"],
        ),
    ],
)
def test_what_is_allowed_is_said_in_the_words_of_the_file(
    file: Path, text: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["check-config", str(file), "--kind", "subscriber"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:-1] == [f"  {line}" for line in expected]


SERVER = "store: {url: /data}\nengine: {type: sglang, servers: [{url: '%s'}]%s}\n"
HOST_PORT = "has to be http://host:port or https://host:port"


@pytest.mark.parametrize("command", [["check-config"], ["smoke", "-c"], ["subscriber", "run", "-c"]])
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:PORT", f"url: 'http://127.0.0.1:PORT': {HOST_PORT}"),
        ("http://127.0.0.1:99999", f"url: 'http://127.0.0.1:99999': {HOST_PORT}"),
        ("http://127.0.0.1:0", f"url: 'http://127.0.0.1:0': {HOST_PORT}"),
        ("http://300.0.0.1:1", f"url: 'http://300.0.0.1:1': {HOST_PORT}"),
        ("http://[::1", f"url: 'http://[::1': {HOST_PORT}"),
        ("http://a,b:3", f"url: 'http://a,b:3': {HOST_PORT}"),
        ("http://a..b:3", f"url: 'http://a..b:3': {HOST_PORT}"),
        ("http://me:sesame@127.0.0.1:3", f"url: 'http://…@127.0.0.1:3': {HOST_PORT}"),
        (f"http://{'a.' * 40}b:3", "name: "),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_by_whoever_reads_it(
    command: list[str], url: str, said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(SERVER % (url, ""))
    assert main([*command, str(file)]) == 1
    told = "".join(capsys.readouterr())
    assert f"engine.servers[0].{said}" in told
    assert "sesame" not in told


@pytest.mark.parametrize("url", ["http://[::1]:3", "https://a-b.c_d.example.", "http://127.0.0.1:65535/"])
def test_a_url_that_can_be_meant_is_not(url: str, file: Path) -> None:
    file.write_text(SERVER % (url, ""))
    assert main(["check-config", str(file)]) == 0


@pytest.mark.parametrize("command", [["check-config"], ["smoke", "-c"], ["subscriber", "run", "-c"]])
@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", "is empty"),
        ("sesame1\nsesame2", "has several lines"),
        ("sesame\n", "has several lines"),
        ("schlüssel-sesame", "has characters that are not ASCII"),
        ("\ufeffsesame", "begins with a byte order mark"),
        ("sesame\x1b", "has control characters"),
        (" sesame", "begins or ends with a space"),
    ],
)
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    command: list[str],
    name: str,
    key: str,
    said: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SERVER_KEY", key)
    file.write_text(SERVER % ("http://127.0.0.1:1", f", {name}: '${{SERVER_KEY}}'"))
    assert main([*command, str(file)]) == 1
    told = "".join(capsys.readouterr())
    assert f"engine.{name}: {said}" in told
    assert "sesame" not in told


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (StoreConfig, {"url": "ftp://me:sesame@h/x", "region": "a"}),
        (StoreConfig, {"url": "s3://me:sesame@h/x"}),
        (SigningConfig, {"key": "sesame", "key_file": "/x"}),
        (PublisherConfig, {"store": {"url": "/x"}, "signing": {"key": "sesame", "key_file": "/x"}}),
        (SubscriberConfig, {"store": {"url": "/x"}, "engine": {"type": "sglang", "api_key": "sesame"}}),
    ],
)
def test_wrong_values_are_not_shown_where_they_may_be_secret(
    model: type[BaseModel], fields: dict[str, object]
) -> None:
    """Neither by an error of the file nor by one of the same keys in Python."""
    with pytest.raises(ConfigError) as of_file:
        parse_config(fields, model, source="some.yaml")
    with pytest.raises(ValidationError) as of_python:
        model.model_validate(fields)
    for error in (of_file.value, of_python.value):
        assert "sesame" not in "".join(traceback.format_exception(error))
