"""The steps of `smoke` for one SGLang server."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from chunkstore.steps import Steps
from chunkstore.words import counted
from subscriber.checks import Stream, name_weights
from subscriber.config import ServerConfig, SGLangEngineConfig
from subscriber.errors import EngineMismatch
from subscriber.sglang.client import Ack, Client, check_access, check_ranks
from subscriber.sglang.engine import SGLangEngine
from subscriber.typed import typed


async def check_server(
    steps: Steps, stream: Stream, config: SGLangEngineConfig, server: ServerConfig, directory: Path
) -> None:
    """Do all steps. `directory`: this server's own, for this run."""
    checked = _Server(stream, config, server, directory)

    async def do(name: str, work: Callable[[], Awaitable[str]], *needs: str) -> None:
        async def careful() -> str:
            with typed(f"{server.name}: checking the {name}"):
                return await work()

        await steps.do(name, careful, needs, server.name)

    await do("server", checked.reach, "config")
    await do("key", checked.show_key, "server")
    await do("plugin", checked.greet, "key")
    await do("supported", checked.support, "plugin")
    await do("shared files", checked.share, "plugin", "versions", "staging")
    await do("mapping", checked.map, "supported", "shared files")
    await do("weights", checked.read, "mapping")
    await checked.close()


class _Server:
    """What is learned of a server: each method is a step and may count on those before it."""

    def __init__(
        self, stream: Stream, config: SGLangEngineConfig, server: ServerConfig, directory: Path
    ) -> None:
        self._stream, self._server = stream, server
        self._client = Client(config, server)
        self._engine = SGLangEngine(config, server, directory)
        self._status = 0
        self._acks: list[Ack] = []
        self._coverage: Mapping[str, int] | EngineMismatch = {}

    async def close(self) -> None:
        await self._client.close()
        await self._engine.close()

    async def reach(self) -> str:
        self._status = await self._client.knock()
        return f"{self._server.url} answers"

    async def show_key(self) -> str:
        check_access(self._server.name, self._status)
        return "the server accepts the key, or wants none"

    async def greet(self) -> str:
        self._acks = await self._client.hello()
        first = self._acks[0]
        held = "" if first["gate"] is None else f"; it is held: {first['gate']}"
        return (
            f"deltasync {first['deltasync']} in SGLang {first['sglang']}, {first['architecture']} on "
            f"{counted(len(self._acks), 'rank')}{held}"
        )

    async def support(self) -> str:
        check_ranks(self._server.name, self._acks)
        return "nothing in this server is refused"

    async def share(self) -> str:
        try:
            self._coverage = await self._engine.coverage(self._stream.catalog)
        except EngineMismatch as error:
            self._coverage = error  # of the next step: the files have been read
        return "the server sees staging_dir, and may write there"

    async def map(self) -> str:
        if isinstance(self._coverage, EngineMismatch):
            raise self._coverage
        elements, zeros = self._coverage["elements"], self._coverage["zeros"]
        return f"all {elements} live elements are known: {self._coverage['loaded']} loaded, {zeros} zeros"

    async def read(self) -> str:
        return await name_weights(self._stream, self._engine)
