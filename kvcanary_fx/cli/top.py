"""Watch what a server or a process guards.

A vLLM server has a Prometheus endpoint (--url http://HOST:8000/metrics).  Any process on this machine that was started
with KVCANARY_STATUS=DIR has a file of its counts there (--pid PID).  With --once the status is 0 if everything is
guarded and no check has failed, 1 if not, and 2 if there is nothing to read.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

from ..errors import EndpointError
from ..reports.metrics_text import Reading, read
from ..reports.untrusted import one_line
from . import processes

#: Seconds in which an endpoint has to answer, and the most bytes that are read of its answer.
TIMEOUT, MOST_BYTES = 10.0, 1 << 26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="of the endpoint, such as http://localhost:8000/metrics")
    where.add_argument("--pid", type=int, help="a process with KVCANARY_STATUS; those that it started are counted, too")
    parser.add_argument("--status", metavar="DIR", help="of the process's file (default: as it was started with)")
    parser.add_argument("--once", action="store_true", help="print one reading and exit")
    parser.add_argument("--every", type=_seconds, default=2.0, metavar="SECONDS", help="between two readings (2)")


def run(args: argparse.Namespace) -> int:
    name, ask = _source(args)
    last, at = ask(), time.monotonic()
    print(render(name, last))
    try:
        while not args.once:
            time.sleep(args.every)
            try:
                news, now = ask(), time.monotonic()
            except EndpointError as e:  # a server that restarts is back soon
                print(f"{_top_of_screen()}kvcanary: {e}", flush=True)
                continue
            print(_top_of_screen() + render(name, news, last, now - at), flush=True)
            last, at = news, now
    except KeyboardInterrupt:
        pass
    return 0 if last.healthy else 1


def _source(args: argparse.Namespace) -> tuple[str, Callable[[], Reading]]:
    """What is watched, and how it is read."""
    if args.pid is not None:
        return f"--pid {args.pid}", functools.partial(processes.reading, args.pid, args.status)
    url = _checked(args.url)
    return url, functools.partial(fetch, url)


def fetch(url: str) -> Reading:
    """The canary's metrics at an endpoint.

    Raises:
        EndpointError: it cannot be read, or has none.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            text = answer.read(MOST_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as e:
        raise EndpointError(url, f"it answers {e.code} {one_line(e.reason)}", "Give the whole path: /metrics") from e
    except (OSError, http.client.HTTPException, ValueError) as e:
        why = one_line(getattr(e, "reason", None) or e)
        remedy = "Start the server, or give the host and port that it listens on"
        raise EndpointError(url, f"it cannot be read ({why})", remedy) from e
    try:
        reading = read(text)
    except ValueError as e:
        remedy = "Give an endpoint in the text format of Prometheus"
        raise EndpointError(url, f"this line cannot be read: {one_line(e)}", remedy) from e
    if reading is None:
        remedy = "Start the server with KVCANARY_MODE=log or raise, and kvcanary_fx installed: docs/vllm.md"
        raise EndpointError(url, "it has no metrics of kvcanary", remedy)
    return reading


def render(name: str, now: Reading, before: Reading | None = None, seconds: float = 0.0) -> str:
    """A reading as text.

    Args:
        before: the reading that many ``seconds`` ago, for what happens per second.
    """

    def count(name: str, what: str) -> str:
        name = f"kvcanary_{name}_total"
        value = now.counts.get(name, 0.0)
        text = f"{value:,.0f} {what}"
        new = value - before.counts.get(name, 0.0) if before is not None else -1.0
        return f"{text} ({new / seconds:,.0f}/s)" if new >= 0 and seconds > 0 else text  # less: the server is another

    guarded = sum(not why for why in now.unguarded.values())
    failed = {check: number for check, number in sorted(now.violations.items()) if number}
    by_check = ", ".join(f"{one_line(check)} {number:,.0f}" for check, number in failed.items())
    within = (
        f"every stored byte within {now.within:.3g} s"
        if now.within
        else "how soon every stored byte is compared is unknown"
    )
    slots = [count("slots_checked", "slots")] if now.counts.get("kvcanary_slots_checked_total") else []  # by an engine
    return "\n".join(
        [
            f"kvcanary top {one_line(name)}, {time.strftime('%H:%M:%S')}",
            f"guarded     {guarded} of {len(now.unguarded)} KV cache groups",
            *(f"  unguarded {one_line(group)}: {one_line(why)}" for group, why in now.unguarded.items() if why),
            f"checked     {', '.join([*slots, count('forwards', 'forwards')])}",
            f"compared    {count('fingerprints_checked', 'fingerprints')}; {within}",
            f"recorded    {count('fingerprints_recorded', 'fingerprints')}",
            f"violations  {sum(failed.values()):,.0f} ({by_check})" if failed else "violations  none",
        ]
    )


def _top_of_screen() -> str:
    """What clears a terminal; in a file, an empty line between two readings."""
    return "\x1b[H\x1b[J" if sys.stdout.isatty() else "\n"


def _checked(url: str | None) -> str:
    """``url``, with /metrics if it has no path.

    Raises:
        EndpointError: there is none, or it is not one of http.
    """
    remedy = "Give --url http://HOST:PORT/metrics of a vLLM server. Of any other process --pid PID: docs/monitoring.md"
    if url is None:
        raise EndpointError("--url or --pid", "neither is given", remedy)
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        parts = urllib.parse.SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EndpointError(one_line(url), "it is no URL of http or https", remedy)
    return url if parts.path.strip("/") else parts._replace(path="/metrics").geturl()


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
