"""`deltasync subscriber run` as a process, driving servers that its config names."""

import json
import signal
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.sglang import oracle
from tests.sglang.conftest import Served
from tests.sglang.training import training
from tests.support.daemons import WAIT, daemon, free_port


def test_one_daemon_follows_for_a_server_while_another_is_away(dense: Served, tmp_path: Path) -> None:
    server, http = dense.server, free_port()
    config = tmp_path / "subscriber.yaml"
    with training(dense.checkpoint, tmp_path) as trainer:
        servers = [
            {"url": server.url, "name": "here"},
            {"url": f"http://127.0.0.1:{free_port()}", "name": "away"},
        ]
        settings = {
            "store": {"url": str(trainer.store)},
            "id": "host",
            "poll_interval": 0.1,
            "state_dir": "state",  # the server runs in another folder
            "http": {"port": http},
            "engine": {"type": "sglang", "servers": servers},
        }
        config.write_text(json.dumps(settings))  # YAML as well
        with daemon(config) as running:
            for steps in (1, 2):
                running.wait_for(rf" applied server=here version={trainer.publish(steps)} ")
                sums = oracle.checksums(server)
            with pytest.raises(HTTPError) as unready:
                urlopen(f"http://127.0.0.1:{http}/readyz", timeout=WAIT)
            assert b"away: " in unready.value.read()
            assert urlopen(f"http://127.0.0.1:{http}/servers/here/readyz", timeout=WAIT).status == 200
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(WAIT) == 0
        oracle.load_from_disk(server, trainer.export(trainer.version), version="oracle")
        assert oracle.checksums(server) == sums
