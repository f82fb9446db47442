"""A constant load for a server with OpenAI's completions: when the first token came, and how long the others took."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp


@dataclasses.dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        url: of the server.
        model: as the server names it.
        requests: how many.
        rate: of them a second, at even distances; ``inf``: all at once.
        input: tokens of a prompt.
        output: new tokens of a request.
        vocabulary: tokens are random numbers below.
        seed: of the tokens.
        name: in the lines that say how far it is.
    """

    url: str
    model: str
    requests: int
    rate: float
    input: int
    output: int
    vocabulary: int
    seed: int
    name: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """One request.

    Attributes:
        first: seconds until its first token.
        each: seconds for each further token.
        end: when its last token came, since the load began.
        longest: seconds that it waited for a further token at most.
    """

    first: float
    each: float
    end: float
    longest: float


class FailedRequest(Exception):
    """A request was refused, cut off, or answered with fewer tokens than it wanted."""


def run(load: Load) -> list[Sample]:
    """Send the load, and wait for the answers; prints a line every 5 s.

    Raises:
        FailedRequest: one was not answered as asked.
    """
    return asyncio.run(_run(load))


async def _run(load: Load) -> list[Sample]:
    import aiohttp  # where a server runs; who asks for help may be elsewhere

    numbers = random.Random(load.seed)
    prompts = [[numbers.randrange(3, load.vocabulary) for _ in range(load.input)] for _ in range(load.requests)]
    bodies = [_body(load, prompt) for prompt in prompts]
    done: list[Sample] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        progress = asyncio.create_task(_tell(load, done))
        began = time.perf_counter()
        tasks = []
        try:
            for number, body in enumerate(bodies):
                await asyncio.sleep(began + number / load.rate - time.perf_counter())
                tasks.append(asyncio.create_task(_request(client, load, body, began, done)))
            await asyncio.gather(*tasks)
        except (aiohttp.ClientError, TimeoutError) as e:
            raise FailedRequest(f"{load.name}: {e!r}") from e
        finally:
            for task in (progress, *tasks):
                task.cancel()
    return done


def _body(load: Load, prompt: list[int]) -> bytes:
    return json.dumps(
        {
            "model": load.model,
            "prompt": prompt,
            "max_tokens": load.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def _request(client: aiohttp.ClientSession, load: Load, body: bytes, began: float, done: list[Sample]) -> None:
    """Send one, and note when its tokens came: several may come in one piece, the last says how many there were."""
    headers = {"Content-Type": "application/json"}
    sent = time.perf_counter()
    first = last = longest = 0.0
    usage: dict[str, Any] | None = None
    async with client.post(f"{load.url}/v1/completions", data=body, headers=headers) as answer:
        if answer.status != 200:
            raise FailedRequest(f"status {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if line.startswith(b'data: {"id"') and b'"choices":[]' not in line:
                now = time.perf_counter()
                longest = max(longest, now - last) if first else 0.0
                first, last = first or now, now
            elif b'"usage"' in line:
                usage = json.loads(line.removeprefix(b"data: "))["usage"]
            elif b'"error"' in line:
                raise FailedRequest(line.decode()[:500])
    if not usage or usage["completion_tokens"] != load.output:
        raise FailedRequest(f"{load.output} tokens were asked for, usage is {usage}")
    each = (last - first) / max(1, load.output - 1)
    done.append(Sample(first - sent, each, last - began, longest))


async def _tell(load: Load, done: list[Sample]) -> None:
    began = time.perf_counter()
    while True:
        await asyncio.sleep(5)
        seconds = time.perf_counter() - began
        print(f"  {load.name}: {len(done)} of {load.requests} requests after {seconds:.0f} s", flush=True)
