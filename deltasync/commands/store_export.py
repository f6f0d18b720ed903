"""`deltasync store export`: any version as a Hugging Face checkpoint."""

import argparse
from pathlib import Path

from chunkstore.words import human_bytes
from deltasync.commands._common import (
    Commands,
    add_base_option,
    add_store_options,
    add_trust_option,
    base_of,
    newest_version,
    print_json,
    store_of,
    trust_of,
    version_number,
)


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "export",
        help="write a version as a Hugging Face checkpoint",
        description="Write a version as safetensors files that transformers loads, or PEFT, if it is an adapter. DIR "
        "appears whole or not at all.",
    )
    add_store_options(parser)
    add_trust_option(parser)
    add_base_option(parser)
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="a folder that does not exist yet, or is empty"
    )
    parser.add_argument("--version", type=version_number, metavar="V", help="default: the newest")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="DIR",
        help="checkpoint folder to copy config.json, or adapter_config.json, and the tokenizer from",
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from deltasync.commands._progress import transfer
    from manifest.export import export_checkpoint
    from manifest.history import find_plan
    from manifest.log import VersionLog, open_stream

    base = base_of(args)
    with transfer("export") as reading:
        store, trust = store_of(args, reading), trust_of(args)
        log = VersionLog(store, open_stream(store, trust), trust=trust)
        version = newest_version(log) if args.version is None else args.version
        if reading.shown:
            reading.expect(find_plan(log, None, version, references=base is not None).nbytes)
        done = export_checkpoint(
            store, version, args.directory, config_dir=args.config, trust=trust, base=base
        )
    if args.json:
        fields = {"version": done.version, "root": done.root, "directory": str(done.directory)}
        print_json(fields | {"files": done.files, "nbytes": done.nbytes})
    else:
        print(
            f"version {done.version}: {human_bytes(done.nbytes)} of tensors in {done.directory}, all digests verified"
        )
    return 0
