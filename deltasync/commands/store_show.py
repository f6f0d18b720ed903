"""`deltasync store show`: the versions of a stream, or one manifest in full."""

import argparse
from typing import TYPE_CHECKING, Any

from chunkstore.words import counted, human_bytes
from deltasync.commands._common import (
    Commands,
    add_store_options,
    add_trust_option,
    print_json,
    store_of,
    table,
    trust_of,
    version_number,
)

if TYPE_CHECKING:
    from manifest.log import VersionLog
    from manifest.schema import Manifest


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "show",
        help="list versions, or print one manifest",
        description="List the versions of a stream, or print one manifest in full.",
    )
    add_store_options(parser)
    add_trust_option(parser)
    parser.add_argument(
        "--version", type=version_number, metavar="V", help="print the manifest of this version"
    )
    parser.add_argument("--alternate", action="store_true", help="with --version: print its alternate anchor")
    parser.add_argument("--json", action="store_true", help="JSON on stdout; hashes and ids as hex")
    parser.set_defaults(run=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    from manifest.log import VersionLog, open_stream

    if args.alternate and args.version is None:
        args.usage_error("--alternate needs --version")
    store, trust = store_of(args), trust_of(args)
    log = VersionLog(store, open_stream(store, trust), trust=trust)
    if args.version is None:
        _show_log(log, args.json)
    else:
        _show_manifest(_manifest(log, args.version, args.alternate), args.json)
    return 0


def _manifest(log: "VersionLog", version: int, alternate: bool) -> "Manifest":
    from chunkstore.errors import ObjectMissing
    from manifest.keys import alternate_key

    if not alternate:
        return log.read_required(version)
    found = log.read_alternate(version)
    if found is None:
        raise ObjectMissing(
            f"{log.store.url}/{alternate_key(version)} is missing: version {version} has no alternate anchor",
            hint="leave --alternate out to see the version's own manifest",
        )
    return found


def _show_log(log: "VersionLog", as_json: bool) -> None:
    """Print the log. Raises, afterwards, the error of the first version that cannot be read."""
    from chunkstore.errors import Action, DeltasyncError

    alternates = set(log.alternates())
    rows: list[dict[str, Any]] = []
    errors: dict[int, DeltasyncError] = {}
    for version in log.versions():
        try:
            rows.append(_row(log.read_required(version)) | {"alternate": version in alternates})
        except DeltasyncError as error:  # a stray key, or one that is damaged, hides no other
            if error.action is Action.RETRY:
                raise
            errors[version] = error
    if as_json:
        unreadable = [{"version": v, "kind": e.kind, "message": e.message} for v, e in errors.items()]
        print_json(
            {"stream": log.stream.id, "url": log.store.url, "versions": rows, "unreadable": unreadable}
        )
    else:
        print(f"stream {log.stream.id.hex()} at {log.store.url}: {counted(len(rows), 'version')}")
        shown = [
            row | {"nbytes": human_bytes(row["nbytes"]), "signer": _short(row["signer"])} for row in rows
        ]
        print(table(shown))
        for version, e in errors.items():
            print(f"version {version} cannot be read: error[{e.kind}]: {e.message}")
    if errors:
        raise next(iter(errors.values()))


def _short(signer: str | None) -> str | None:
    return None if signer is None else signer[:16] + "…"


def _row(manifest: "Manifest") -> dict[str, Any]:
    from manifest.signing import signer_of

    return {
        "version": manifest.version,
        "kind": manifest.kind,
        "base": manifest.base_version,
        "epoch": manifest.epoch,
        "train_step": manifest.train_step,
        "changed": manifest.stats.changed,
        "elements": manifest.stats.elements,
        "chunks": len(manifest.chunks),
        "nbytes": manifest.nbytes,
        "signer": signer_of(manifest.signature),
    }


def _show_manifest(manifest: "Manifest", as_json: bool) -> None:
    from manifest.signing import signer_of

    if as_json:
        fields = manifest.model_dump()
        fields["digests"] = [f"{digest:016x}" for digest in manifest.digest_array]
        print_json({"hash": manifest.hash, "signer": signer_of(manifest.signature), **fields})
        return
    fields = manifest.model_dump(exclude={"chunks", "stats", "digests", "signature"})
    fields |= {f"stats.{name}": value for name, value in manifest.stats.model_dump().items()}
    for name, value in fields.items():
        print(f"{name:24} {value.hex() if isinstance(value, bytes) else value}")
    print(f"{'signer':24} {signer_of(manifest.signature)}")
    print(f"{'tensors':24} {len(manifest.digest_array)}")
    print(f"{'chunks':24} {len(manifest.chunks)}, {human_bytes(manifest.nbytes)}")
    chunks = [
        {"key": c.key, "nbytes": c.nbytes, "sections": len(c.sections), "blake3": c.hash.hex()[:16]}
        for c in manifest.chunks
    ]
    print(table(chunks))
