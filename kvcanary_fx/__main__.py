"""``python -m kvcanary_fx``: see the canary at work, and ask what it does to a model."""

from __future__ import annotations

import argparse
import sys

from .cli import campaign, demo, doctor, explain, inspect, replay, top
from .errors import CanaryError


def main(argv: list[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    parser = argparse.ArgumentParser(prog="kvcanary", description="An AddressSanitizer for the KV cache of LLMs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, explain, doctor, campaign, inspect, replay, top):
        name = command.__name__.rsplit(".", 1)[-1]
        summary = (command.__doc__ or "").splitlines()[0]
        sub = commands.add_parser(
            name,
            help=summary,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except CanaryError as e:
        print(f"kvcanary: {e}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
