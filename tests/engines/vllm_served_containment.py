"""What clients of vLLM's OpenAI server get where a block of its KV cache is damaged, or freed too early.

    python tests/engines/vllm_served_containment.py --logs DIRECTORY [--jobs 3] [--servers recompute-all ...]

One server for each outcome (``KVCANARY_VLLM_ON_VIOLATION``: ``recompute``, ``abort``, ``log``) and each way to compare:
``all`` (``KVCANARY_BUDGET=none``) or ``default`` (as a user has it; on a CPU, where that is all, 1/32 in each step).
Clients stream over HTTP.  In the engine a slot is ruined right before a forward, or blocks are freed by a scheduler
with a bug:

* ``shared``: in a block that three requests read, beside one that has other blocks;
* ``gone``: in a block that two requests read, whose first owner has ended;
* ``idle``: in a block of the prefix cache that nobody has, and which a request takes up;
* ``early``: blocks that are freed and handed on while a request reads them.

A token is *wrong* if the model, without damage, would not choose it behind the tokens before it; the server is asked
that afterwards (``prompt_logprobs``, which read no prefix from the cache).  With ``log`` some must be wrong, or the
damage would show nothing.  With ``recompute`` and ``abort`` none may be, and under a budget none that came after the
time that the server says (``kvcanary_compared_within_seconds``; if it says none, after as many steps as all slots
take).  The tokens are also compared with those of the same requests before any damage; in bfloat16 these may differ by
what else is in a batch.  Then: what clients were told, the log's line with the same id, the metrics, and a later
request with the damaged prompt.

One line of JSON for each scene, and a summary; the exit status is 1 if something is not ``ok``.  Without a GPU it is
Model Runner V1, in float32 and eager; with one it is V2, and full CUDA graphs are asked for.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import http.client
import json
import os
import pathlib
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import tiny_configs
import tiny_vllm
import torch
import vllm_v2_models
from tiny_vllm import client_name
from vllm_rig import prompt
from vllm_serve import Server, metrics

SERVERS = ("recompute-all", "abort-all", "log-all", "recompute-default", "abort-default")

#: How far the log probability of a token may be below the best one's, where the model would choose it: bfloat16.
NEAR = {True: 0.3, False: 1e-3}

#: What is compared in each step on a CPU instead of the default budget, and on a GPU before a budget knows its cost.
CPU_SHARE, GPU_SHARE = 32, 64

#: Seconds by which the time that the server says may be exceeded: what it takes to reach the client.
DELIVERY = 0.3

WITHIN = "kvcanary_compared_within_seconds"
GUARDED = 'kvcanary_guarded{group="group0",reason=""}'
CONTAINED = re.compile(
    r"kv_cache_corruption (kvc-\w+): \d+ violations?; blocks (.*?) left the prefix cache; recomputed: (.*?); "
    r"aborted: (.*?)(?:; tokens sent before: (.*))?$",
    re.MULTILINE,
)


@dataclasses.dataclass
class Stream:
    """A client with one request, whose tokens come one by one.

    Attributes:
        came: when each token did, by the monotonic clock.
        finish: ``finish_reason``; ``reason`` is ``stop_reason``, and ``error`` the message of an error.
    """

    port: int
    name: str
    prompt: list[int]
    length: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    came: list[float] = dataclasses.field(default_factory=list)
    finish: str | None = None
    reason: Any = None
    error: str | None = None

    def __post_init__(self) -> None:
        self._news = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def wait(self, tokens: int) -> Stream:
        """Until so many tokens have come, or the request is over."""
        with self._news:
            if not self._news.wait_for(lambda: self._over or len(self.tokens) >= tokens, 120):
                raise TimeoutError(f"{self.name}: {len(self.tokens)} tokens")
        return self

    def join(self) -> Stream:
        """Until the request is over."""
        return self.wait(1 << 30)

    def _run(self) -> None:
        try:
            for event in self._events():
                self._take(event)
        except Exception as e:
            self.error = f"client: {e!r}"
        with self._news:
            self._over = True
            self._news.notify_all()

    def _events(self) -> Iterator[dict[str, Any]]:
        body = dict(model="tiny", prompt=self.prompt, max_tokens=self.length, temperature=0, ignore_eos=True)
        body |= dict(stream=True, return_token_ids=True)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", "X-Request-Id": self.name}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            yield json.loads(answer.read())
            return
        for line in answer:
            text = line.decode().strip()
            if text.startswith("data: {"):
                yield json.loads(text.removeprefix("data: "))
        connection.close()

    def _take(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        with self._news:
            if "error" in event:
                self.error = event["error"]["message"]
            for choice in event.get("choices", ()):
                new = choice.get("token_ids") or []
                self.tokens += new
                self.came += [now] * len(new)
                self.finish = choice.get("finish_reason") or self.finish
                self.reason = choice.get("stop_reason") or self.reason
            self._news.notify_all()


class Run:
    """A server and the scenes on it.

    Args:
        logs: the folder for the server's log.
        name: which server, of :data:`SERVERS`.
        length: tokens of the requests that go on longest.
    """

    def __init__(self, logs: pathlib.Path, name: str, length: int):
        self.name = name
        self.outcome, _, compared = name.partition("-")
        self.late = compared == "default"
        self.on_gpu = torch.cuda.is_available()
        self.block = 16 if self.on_gpu else 32
        self.length = length
        self.log = logs / f"{name}.log"
        shared = prompt(7, 2 * self.block)
        self.prompts = {
            "A": shared + prompt(8, 5),
            "B": shared + prompt(9, 5),
            "C": shared + prompt(10, 5),
            "D": prompt(11, 2 * self.block + 5),
            "early-A": prompt(12, 2 * self.block + 5),
            "early-E": prompt(13, 3 * self.block + 5),
        }
        self.clean: dict[str, list[int]] = {}
        self.worst = 0.0
        self.within = 0.0
        self._token = 0.0  # seconds
        self._read = 0
        arguments = ["--worker-extension-cls", "vllm_ruin.Ruin", "--max-num-seqs", "8"]
        arguments += ["--load-format", "filled"]
        if self.on_gpu:
            graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
            arguments += ["--dtype", "bfloat16", "--block-size", "16", "--num-gpu-blocks-override", "1024"]
            arguments += ["--scheduler-cls", "vllm_early.EarlyAsync", "--compilation-config", json.dumps(graphs)]
            arguments += ["--gpu-memory-utilization", "0.15"]  # what must be free; the cache has a size of its own
        else:
            arguments += ["--enforce-eager", "--scheduler-cls", "vllm_early.Early"]
        arguments += ["--max-model-len", str(4 * self.block + length + 16)]
        tiny_configs.CONFIGS["served"] = vllm_v2_models.MODELS["llama"] | dict(max_position_embeddings=8192)
        self._cache = logs / name / "cache"
        self.server = Server(logs / name, *arguments, model="served", log=self.log, environment=self._environment())

    def _environment(self) -> dict[str, str]:
        here = os.path.dirname(os.path.abspath(__file__))
        found = {name: value for name, value in tiny_vllm.ENVIRONMENT.items() if not name.startswith("VLLM_ENABLE_V1")}
        found |= dict(VLLM_SERVER_DEV_MODE="1", VLLM_LOGGING_LEVEL="INFO", KVCANARY_MODE="log")
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        found["KVCANARY_VLLM_ON_VIOLATION"] = self.outcome
        found["VLLM_CACHE_ROOT"] = os.fspath(self._cache.absolute())  # servers that compile at once
        if not self.late:
            found["KVCANARY_BUDGET"] = "none"
        elif not self.on_gpu:
            found["KVCANARY_VERIFY_FRACTION"] = f"1/{CPU_SHARE}"
        return found

    # ---- the server

    def start(self) -> dict[str, Any]:
        """Until the server is ready, and has shown what the requests get undamaged."""
        began = time.monotonic()
        self.server.wait(420)
        at_health = metrics(self.server)
        facts = self._call("follow_requests")
        began, ready = time.monotonic(), time.monotonic() - began
        streams = [self._stream(f"clean-{name}", name) for name in self.prompts]
        self.clean = {stream.name.removeprefix("clean-"): stream.join().tokens for stream in streams}
        seconds, self.worst = time.monotonic() - began, 0.0
        for name, tokens in self.clean.items():
            short = self._short_of_best(self.prompts[name], tokens)
            self.worst = max([self.worst, *short])
        full = [len(tokens) == self.length for tokens in self.clean.values()]
        found = dict(ok=all(full) and self.worst <= NEAR[self.on_gpu] and self._violations() == {})
        found["ok"] &= at_health.get(GUARDED) == 1
        if self.on_gpu:
            v2 = ".worker.gpu." in facts["runner"] and facts["captured"] > 0 and "FULL" in facts["graphs"]
            found["ok"] &= v2 or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"
        if self.late:
            self._token = seconds / self.length
            too_long = self._learn_within()
            found |= dict(within=self.within, ok=found["ok"] and not too_long, too_long=too_long)
        return found | dict(
            ready=round(ready, 1), guarded=at_health.get(GUARDED), worst=round(self.worst, 4),
            tokens_per_second=round(sum(map(len, self.clean.values())) / seconds), errors=_errors(streams), **facts,
        )  # fmt: skip

    def _learn_within(self) -> str | None:
        """The time that the server says, once a request takes longer than that; else why it does not.

        The first time is of few steps, and on a busy host a long one.  It changes while the server runs: for one tiny
        model it went from 0.3 to 9 s and back, and damage was found in a later request, when this one had ended.
        """
        end = time.monotonic() + 20
        while self.on_gpu:  # on a CPU the share is fixed, and has no time
            self.within = metrics(self.server)[WITHIN]
            enough = round(1.5 * self.within / self._token) + 2 * GPU_SHARE
            if self.within and enough <= self.length:
                break
            if time.monotonic() > end:
                return f"{self.within:.2f} s are said: {enough} tokens of a request, which has {self.length} (--length)"
            for stream in [self._stream(f"load-{name}", name, 300) for name in "ABCD"]:
                stream.join()
        return None

    def _call(self, method: str, *arguments: str) -> dict[str, Any]:
        answer = self.server.post("/collective_rpc", {"method": method, "args": list(arguments)})
        if "results" not in answer:
            raise RuntimeError(f"{method}: {answer}")
        return answer["results"][0] or {}

    def _stream(self, name: str, of: str, length: int | None = None) -> Stream:
        return Stream(self.server.port, name, self.prompts[of], length or self.length)

    def _violations(self) -> dict[str, int]:
        found = metrics(self.server)
        return {name.split('"')[1]: int(n) for name, n in found.items() if name.startswith("kvcanary_violations") and n}

    def _counted(self, before: dict[str, int], wanted: str | None = None) -> dict[str, int]:
        """The violations since then, by check; that one is waited for, as counts may be two seconds old."""
        end = time.monotonic() + 5
        while True:
            found = {check: n - before.get(check, 0) for check, n in self._violations().items()}
            found = {check: n for check, n in found.items() if n}
            if wanted is None or wanted in found or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def _short_of_best(self, given: list[int], tokens: list[int]) -> list[float]:
        """How far each token's log probability is below the best one's, behind what was before it."""
        if not tokens:
            return []
        body = dict(model="tiny", prompt=given + tokens, max_tokens=1, temperature=0, prompt_logprobs=1)
        told = self.server.post("/v1/completions", body)["choices"][0]["prompt_logprobs"][len(given) :]
        return [
            max(entry["logprob"] for entry in place.values()) - place[str(token)]["logprob"]
            for token, place in zip(tokens, told, strict=True)
        ]

    def _wrong(self, stream: Stream) -> list[int]:
        """The places of its tokens that were computed from damage."""
        limit = max(NEAR[self.on_gpu], 2 * self.worst)
        short = self._short_of_best(stream.prompt, stream.tokens)
        return [place for place, far in enumerate(short) if far > limit]

    def _log_lines(self, wanted: bool) -> list[tuple[str, ...]]:
        """What the log says was contained since the last call; where a line must come, it is waited for."""
        end = time.monotonic() + 10
        while True:
            text = self.log.read_text(errors="replace")
            found: list[tuple[str, ...]] = CONTAINED.findall(text, self._read)
            if found or not wanted or time.monotonic() > end:
                self._read = len(text)
                return found
            time.sleep(0.05)

    # ---- the scenes

    def scene(self, name: str) -> dict[str, Any]:
        """Plant the damage, and judge what clients, log and metrics say of it."""
        too_long = self._learn_within() if self.late else None
        end = time.monotonic() + 10
        while not self.server.post("/reset_prefix_cache", {}).get("success"):
            if time.monotonic() > end:
                raise TimeoutError("blocks are held")
        before = self._violations()
        streams, concerned, check = SCENES[name](self)
        for stream in streams:
            stream.join()
        planted = self._call("planted_ruin") if check == "content" else {}
        at_once = check in self._counted(before)
        self._stream(f"settle-{name}", "D", 4).join()  # a step in which the workers hear what ended
        checks = self._counted(before, check)
        contained = self._log_lines(wanted=True)
        wrong = [too_long] if too_long else []
        if check == "content" and not planted:
            wrong.append("nothing was planted")
        if check not in checks:
            wrong.append(f"the metrics count no violation of {check}")
        self._judge_log(contained, concerned, wrong)
        table = {}
        for stream in streams:
            known = stream.name in concerned
            table[stream.name] = self._judge_client(stream, known, planted, contained, wrong)
        if self.outcome == "log" and not any(table[known]["wrong"] for known in concerned):
            wrong.append("the damage changed no token")
        self._judge_later(name, wrong)
        return dict(
            ok=not wrong, wrong_because=wrong, clients=table, checks=checks, counted_at_once=at_once, log=contained[:3],
            planted=planted, within=metrics(self.server).get(WITHIN),
        )  # fmt: skip

    def _judge_log(self, contained: list[tuple[str, ...]], concerned: set[str], wrong: list[str]) -> None:
        if not contained:
            wrong.append("the log has no line about it")
        named = {
            kind: {client_name(word) for line in contained for word in line[place].split() if word != "none"}
            for kind, place in (("recompute", 2), ("abort", 3))
        }
        for kind, names in named.items():
            if names != (concerned if kind == self.outcome else set()):
                wrong.append(f"the log says {kind} of {sorted(names)}")

    def _judge_client(
        self, stream: Stream, concerned: bool, planted: dict[str, Any], contained: list[tuple[str, ...]],
        wrong: list[str],
    ) -> dict[str, Any]:  # fmt: skip
        bad = self._wrong(stream)
        clean = self.clean[_prompt_of(stream.name)][: len(stream.tokens)]
        same = stream.tokens == clean
        row = dict(tokens=len(stream.tokens), finish=stream.finish, same=same, wrong=len(bad), concerned=concerned)
        told = stream.error or (stream.reason if isinstance(stream.reason, str) else None)
        row["told"] = told

        def no(what: str) -> None:
            wrong.append(f"{stream.name}: {what}")

        if concerned and self.outcome == "abort":
            self._judge_told(told, len(stream.tokens), contained, no)
            if stream.finish is not None or stream.error is None:
                no(f"ended as {stream.finish}")
        else:
            if stream.finish != "length" or len(stream.tokens) != stream.length or stream.error:
                no(f"ended as {stream.finish} with {len(stream.tokens)} tokens")
            if concerned and self.outcome == "recompute" and self.late:
                self._judge_told(told, None, contained, no)
            elif told:
                no("was told something")
        if concerned and self.outcome == "log":
            return row
        self._judge_wrong(stream, bad, same, concerned, planted, row, no)
        return row

    def _judge_wrong(
        self, stream: Stream, bad: list[int], same: bool, concerned: bool, planted: dict[str, Any],
        row: dict[str, Any], no: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Tokens from damage: none, but under a budget those of requests that were reading it, for some time."""
        allowed = concerned and self.late and bool(planted) and stream.name in planted["readers"]
        if not bad:
            if not (same or self.on_gpu or allowed):
                no("has other tokens than without damage")
            return
        if not allowed:
            no(f"tokens {bad[:3]} were computed from damage")
            return
        within = max(self.within, metrics(self.server)[WITHIN])
        after = [stream.came[place] - planted["time"] for place in bad]
        steps = sum(came >= planted["time"] for came in stream.came[: bad[-1] + 1])
        row |= dict(damage_came_for=round(max(after), 3), steps=steps, within=round(within, 3))
        if min(after) < 0:
            no("a token was wrong before the damage")
        if within and max(after) > within + DELIVERY:
            no(f"a token from damage came {max(after):.2f} s after it, {within:.2f} s are said")
        if not within and steps > (GPU_SHARE if self.on_gpu else CPU_SHARE) + 2:
            no(f"a token from damage came {steps} steps after it")
        sent = re.search(r", (\d+) tokens had been sent", str(row["told"]))
        if sent is None or bad[-1] >= int(sent[1]):
            no(f"token {bad[-1]} was computed from damage after it was found")

    def _judge_told(
        self, told: str | None, received: int | None, contained: list[tuple[str, ...]], no: Callable[[str], None]
    ) -> None:
        """The client's id is in the log, and under a budget it hears how many tokens had been sent."""
        number = re.search(r"kvc-\w+", told or "")
        if number is None or number[0] not in {line[0] for line in contained}:
            no(f"the log has no line for what it was told: {told}")
        sent = re.search(r", (\d+) tokens had been sent", told or "")
        if (sent is not None) != self.late:
            no(f"was told {told}")
        elif sent is not None and received not in (None, int(sent[1])):
            no(f"was told of {sent[1]} tokens, and got {received}")

    def _judge_later(self, scene: str, wrong: list[str]) -> None:
        """Requests with the damaged prompt, and what the metrics say of them."""
        before = self._violations()
        of = "early-A" if scene == "early" else "B"
        later = self._stream(f"later-{scene}", of, 24).join()
        if later.finish != "length" or self._wrong(later):
            wrong.append(f"a later request is wrong: {later.error or self._wrong(later)[:3]}")
        if not self.on_gpu and later.tokens != self.clean[of][:24]:
            wrong.append("a later request has other tokens than without damage")
        if self._violations() != before:
            wrong.append(f"a later request is told: {self._violations()} after {before}")


Planted = tuple[list[Stream], set[str], str]


def _shared(run: Run) -> Planted:
    names = [f"shared-{name}" for name in "ABCD"]
    run._call("arm_ruin", json.dumps(dict(of=names[0], place=1, decoding=names, ended=[], steps=4)))
    streams = [run._stream(names[0], "A").wait(1)]
    streams += [run._stream(name, name[-1]) for name in names[1:]]
    return streams, set(names[:3]), "content"


def _gone(run: Run) -> Planted:
    names = [f"gone-{name}" for name in "ABCD"]
    run._call("arm_ruin", json.dumps(dict(of=names[0], place=1, decoding=names[1:], ended=names[:1], steps=4)))
    streams = [run._stream(names[0], "A", 32).wait(1)]
    streams += [run._stream(name, name[-1]) for name in names[1:]]
    return streams, set(names[1:3]), "content"


def _idle(run: Run) -> Planted:
    streams = [run._stream("idle-A", "A", 8).join(), run._stream("idle-D", "D").wait(4)]
    run._call("ruin_block", "idle-A", "1")
    return [*streams, run._stream("idle-B", "B")], {"idle-B"}, "content"


def _early(run: Run) -> Planted:
    streams = [run._stream("early-D", "D"), run._stream("early-A", "early-A").wait(12)]
    return [*streams, run._stream("early-E", "early-E")], {"early-A"}, "owner"


#: Each gives the clients, those that read the damage, and the check that must tell it.
SCENES: dict[str, Callable[[Run], Planted]] = {"shared": _shared, "gone": _gone, "idle": _idle, "early": _early}


def _prompt_of(client: str) -> str:
    return client if client in ("early-A", "early-E") else client[-1]


def _errors(streams: list[Stream]) -> list[str]:
    return [f"{stream.name}: {stream.error}" for stream in streams if stream.error]


#: Threads must not import the same modules for the first time at once.
_STARTING = threading.Lock()


def run(logs: pathlib.Path, name: str, scenes: list[str], length: int, told: Callable[..., None]) -> bool:
    """The scenes on one server; whether all are right."""
    told(server=name, starting=True)
    with _STARTING:
        made = Run(logs, name, length)
    right = True
    try:
        for scene in ("start", *scenes):
            found = made.start() if scene == "start" else made.scene(scene)
            right = right and found["ok"]
            told(server=name, scene=scene, **found)
    except Exception as e:
        right = False
        tail = made.log.read_text(errors="replace")[-1500:]
        told(server=name, ok=False, failed=repr(e), trace=traceback.format_exc()[-800:], log_tail=tail)
    finally:
        made.server.close()
    return right


def main() -> None:
    """Server after server, or several at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=pathlib.Path, required=True, help="the folder for the servers' logs")
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=SERVERS)
    parser.add_argument("--scenes", nargs="+", default=list(SCENES), choices=list(SCENES))
    parser.add_argument("--jobs", type=int, default=1, help="servers at once")
    parser.add_argument("--length", type=int, help="tokens of the longest requests")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    length = args.length or (1600 if torch.cuda.is_available() else 160)
    began, lock = time.monotonic(), threading.Lock()

    def told(**found: Any) -> None:
        with lock:
            print(json.dumps(dict(at=round(time.monotonic() - began, 1), **found)), flush=True)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        right = list(pool.map(lambda name: run(args.logs, name, args.scenes, length, told), args.servers))
    told(ok=all(right), servers=dict(zip(args.servers, right, strict=True)))
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
