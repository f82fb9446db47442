"""``python -m kvcanary_fx``: see the canary at work, and ask what it does to a model."""

from __future__ import annotations

import argparse
import importlib
import sys

from .errors import CanaryError

#: The modules of :mod:`.cli` that are commands, and the first line of each: a module is imported if its command is
#: given, since most of them import torch.
COMMANDS = {
    "demo": "Generate text with a guarded tiny model, then flip one bit and show the report.",
    "explain": "Show which KV writes of a model are guarded, which are not and why.",
    "doctor": "Plant one fault per check on scratch pools, and show which checks report theirs.",
    "campaign": "Inject faults into a small serving engine, one per run, and count what the canary says.",
    "inspect": "Show the file of an incident: what happened, which slots were damaged, and what surrounds them.",
    "replay": "Run the checks that failed again, on the bytes and slots in the file of an incident.",
    "top": "Watch what a server or a process guards.",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="kvcanary", description="An AddressSanitizer for the KV cache of LLMs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in given:
            command = importlib.import_module(f".cli.{name}", __package__)
            sub.description = command.__doc__
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    args = parser.parse_args(given)
    try:
        status: int = args.run(args)
    except CanaryError as e:
        print(f"kvcanary: {e}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
