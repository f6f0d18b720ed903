"""subscriber.yaml: a short file is enough, and every wrong key is named."""

from pathlib import Path

import pytest

from chunkstore.config import load_config
from chunkstore.errors import ConfigError
from subscriber.config import SubscriberConfig


def load(tmp_path: Path, text: str) -> SubscriberConfig:
    path = tmp_path / "subscriber.yaml"
    path.write_text(text)
    return load_config(path, SubscriberConfig)


def test_only_the_store_is_required(tmp_path: Path) -> None:
    config = load(tmp_path, "store: {url: 's3://bucket/policy'}")
    assert config.id
    assert config.http is not None
    assert config.staging_path == config.state_dir.expanduser() / "staging" / config.id


def test_everything(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
store: {url: /streams/policy}
id: rollout-7
poll_interval: 0.5
state_dir: /var/lib/deltasync
staging_dir: /dev/shm/deltasync
status_interval: 10
audit_every: 50
fetch_concurrency: 8
prefetch_bytes: 0
http: null
engine: {type: torch, factory: "my.code:build"}
""",
    )
    assert str(config.staging_path) == "/dev/shm/deltasync/rollout-7"
    assert str(config.state_path) == "/var/lib/deltasync/rollout-7"


def test_servers_are_told_an_absolute_staging_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(tmp_path, "store: {url: /s}\nid: a\nstate_dir: state")
    assert config.staging_path == tmp_path / "state" / "staging" / "a"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("store: {url: /s}\npoll_intervall: 1", "poll_intervall"),
        ("store: {url: /s}\npoll_interval: 0", "poll_interval"),
        ("store: {url: /s}\npoll_interval: .inf", "poll_interval"),
        ("store: {url: /s}\nid: ../escape", "id"),
        ("store: {url: /s}\nhttp: {prot: 80}", "http.prot"),
        ("store: {url: /s}\nengine: {type: torch, factory: build}", "engine.factory"),
        ("store: {url: /s}\nengine: {factory: 'a:b'}", "engine: which kind"),
        ("store: {url: /s}\nengine: {type: vllm, factory: 'a:b'}", "'torch', 'sglang'"),
        ("store: {url: /s}\nengine: {type: sglang, servers: []}", "engine.servers"),
        (
            "store: {url: /s}\nengine: {type: sglang, servers: [{url: '127.0.0.1:1'}]}",
            "engine.servers[0].url",
        ),
        (
            "store: {url: /s}\nengine: {type: sglang, servers: [{url: 'http://a:1'}, {url: 'http://a:1/', name: b}]}",
            "two servers",
        ),
        (
            "store: {url: /s}\nengine: {type: sglang, servers: [{url: 'http://a:1'}], api_key: a, api_key_file: /b}",
            "not both",
        ),
        ("{}", "store"),
    ],
)
def test_a_wrong_key_is_named(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert named in str(caught.value)
