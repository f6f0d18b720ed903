"""Where the daemons' HTTP server listens: what can be no host is refused by name, and before anything starts."""

import pytest

from chunkstore.config import parse_config
from chunkstore.errors import ConfigError
from chunkstore.http import HttpConfig, check_address


@pytest.mark.parametrize("host", ["ü" * 70, "a" * 70, "a..b", "a\0b", "a b"])
def test_what_can_be_no_host_is_named(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"(?s)1 wrong key\n  host: .* has to be a name or an address"):
        parse_config({"host": host}, HttpConfig, source="x")
    if "\0" not in host:
        monkeypatch.setenv("PLACE", host)
        with pytest.raises(ConfigError) as caught:
            parse_config({"host": "${PLACE}"}, HttpConfig, source="x")
        assert host not in caught.value.message


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "127.0.0.1", "localhost", "my_host.local.", "bücher.example"]
)
def test_what_can_be_a_host_is_taken(host: str) -> None:
    assert parse_config({"host": host}, HttpConfig, source="x").host == host


def test_a_name_that_is_no_address_here_is_not_blamed_on_the_port() -> None:
    with pytest.raises(ConfigError, match=r"http\.host: 'nowhere\.invalid'") as caught:
        check_address(HttpConfig(host="nowhere.invalid", port=0))
    assert "http.host" in caught.value.hint
    assert "another port" not in caught.value.hint
