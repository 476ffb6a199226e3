"""The command line of the contract tests."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvferry.contract.leader_checks import LeaderChecks
from kvferry.contract.live import Broken, Unavailable
from kvferry.contract.played import Target
from kvferry.contract.rules import Report
from kvferry.contract.script import Script
from kvferry.contract.scripted import Driver, ScriptedKvferry
from kvferry.contract.server import Settings

#: Exit statuses: every observed rule is kept; some rule is broken; the checks cannot run.
PASSED, FAILED, CANNOT_RUN = 0, 1, 3


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m kvferry.contract", description="Contract tests: see docs/contract.md.")
    commands = parser.add_subparsers(dest="command", required=True)
    leader = commands.add_parser("leader", help="check a running kvferry")
    serve = commands.add_parser("serve", help="play a kvferry, and check the connector that talks to it")
    for each in (leader, serve):
        each.add_argument("--socket-dir", type=Path, required=True, metavar="DIR")
        each.add_argument("--json", action="store_true", help="write the report as one line of JSON")
        each.add_argument("--ranks", type=int, default=0, metavar="N", help="ranks of the engine")
    leader.add_argument("--replica", type=int, default=0, metavar="N")
    leader.add_argument("--kv-shards", type=int, default=0, metavar="N", help="as kvferry is configured")
    leader.add_argument("--page-tokens", type=int, default=0, metavar="N", help="tokens of a page; 16")
    leader.add_argument("--discard-pages", action="store_true", help="run although pages of an engine get lost")
    serve.add_argument("--script", type=Path, metavar="FILE", help="events to play, one a line, in JSON")
    serve.add_argument("--record", type=Path, metavar="FILE", help="write every message, one a line, in JSON")
    serve.add_argument("--driver", action="store_true", help="read prompts and orders from the standard input")
    serve.add_argument("--for", type=float, default=0, dest="for_s", metavar="SECONDS", help="end after this time")
    serve.add_argument("--heartbeat-ms", type=int, default=1000, metavar="N")
    serve.add_argument("--request-credits", type=int, default=32, metavar="N")
    return parser


def _written(report: Report, as_json: bool) -> int:
    print(report.as_json() if as_json else report.as_text())
    return PASSED if report.passed else FAILED


def _check_leader(options: argparse.Namespace) -> int:
    target = Target(
        options.socket_dir,
        replica=options.replica,
        ranks=options.ranks,
        page_tokens=options.page_tokens,
        kv_shards=options.kv_shards,
        discard_pages=options.discard_pages,
    )
    return _written(LeaderChecks(target).run(), options.json)


@contextlib.contextmanager
def _recorder(path: Path | None) -> Iterator[Any]:
    if path is None:
        yield None
        return

    def shown(value: Any) -> Any:
        match value:
            case bytes():
                return value.hex()
            case dict():
                return {str(name): shown(each) for name, each in value.items()}
            case list() | tuple():
                return [shown(each) for each in value]
        return value

    with path.open("wb") as file:
        encode = msgspec.json.Encoder().encode
        yield lambda message: file.write(encode(shown(message)) + b"\n")


def _serve(options: argparse.Namespace) -> int:
    script = Script.read(options.script.read_text()) if options.script else Script()
    settings = Settings(
        ranks=options.ranks or 1, heartbeat_ms=options.heartbeat_ms, request_credits=options.request_credits
    )
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with _recorder(options.record) as record:
        kvferry = ScriptedKvferry(options.socket_dir, settings, script, record=record)
        kvferry.start()
        print(f"serving in {options.socket_dir}", file=sys.stderr, flush=True)
        if options.driver:
            driver = Driver(kvferry)

            def read() -> None:
                driver.run(sys.stdin, sys.stdout)
                ended.set()

            threading.Thread(target=read, daemon=True).start()
        ended.wait(options.for_s or None)
        report = kvferry.stop()
    return _written(report, options.json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    options = _arguments().parse_args(arguments)
    try:
        return _check_leader(options) if options.command == "leader" else _serve(options)
    except (Unavailable, Broken, OSError, ValueError) as error:
        print(f"kvferry.contract: {error}", file=sys.stderr)
        return CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main())
