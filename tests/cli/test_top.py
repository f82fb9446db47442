"""``kvcanary top``: a server's metrics as text, its status, and what it answers where there is nothing to read."""

from __future__ import annotations

import http.server
import re
import threading
import time

import pytest

from kvcanary_fx.__main__ import main
from kvcanary_fx.reports.metrics_text import read

GOOD = """\
# HELP kvcanary_guarded Whether a KV cache group is guarded, and why not.
# TYPE kvcanary_guarded gauge
kvcanary_guarded{group="0",reason=""} 1.0
vllm:num_requests_running{engine="0"} 3.0
kvcanary_forwards_total 640.0
kvcanary_slots_checked_total 81920.0
kvcanary_fingerprints_checked_total 2560.0
kvcanary_fingerprints_recorded_total 4.096e+04
kvcanary_compared_within_seconds 1.6
kvcanary_violations_total{check="content"} 0.0
kvcanary_violations_total{check="owner"} 0.0
"""
UNGUARDED = 'kvcanary_guarded{group="draft",reason="no \\"known\\" layout {a} \\\\ b\\nx\x1b[31m"} 0.0\n'


class Server:
    """Answers each request with the next of its texts, and with the last one from then on."""

    def __init__(self) -> None:
        self.texts, self.status = [GOOD], 200
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = outer.texts.pop(0) if len(outer.texts) > 1 else outer.texts[0]
                self.send_response(outer.status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/metrics"


@pytest.fixture
def server():
    serving = Server()
    thread = threading.Thread(target=serving.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield serving
    serving.http.shutdown()
    thread.join()
    serving.http.server_close()


def once(server: Server) -> int:
    return main(["top", "--url", server.url, "--once"])


def test_a_server_that_guards_everything_and_found_nothing(server, capsys):
    assert once(server) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith(f"kvcanary top {server.url}, ")
    assert lines == [
        "guarded     1 of 1 KV cache groups",
        "checked     81,920 slots, 640 forwards",
        "compared    2,560 fingerprints; every stored byte within 1.6 s",
        "recorded    40,960 fingerprints",
        "violations  none",
    ]


def test_violations_are_shown_by_check_and_in_the_status(server, capsys):
    server.texts = [GOOD.replace('{check="owner"} 0.0', '{check="owner"} 3.0').replace('tent"} 0', 'tent"} 2')]
    assert once(server) == 1
    assert "violations  5 (content 2, owner 3)" in capsys.readouterr().out


def test_an_unguarded_group_is_named_with_its_reason_and_cannot_colour_the_terminal(server, capsys):
    server.texts = [GOOD + UNGUARDED]
    assert once(server) == 1
    out = capsys.readouterr().out
    assert "guarded     1 of 2 KV cache groups" in out
    assert r'  unguarded draft: "no \"known\" layout {a} \\ b\nx\u001b[31m"' in out


def test_a_server_that_names_no_group_is_not_taken_for_guarded(server):
    server.texts = [GOOD.replace("kvcanary_guarded{", "other{")]
    assert once(server) == 1


def test_the_path_may_be_left_out(server):
    assert main(["top", "--url", server.url.removesuffix("/metrics"), "--once"]) == 0


def test_readings_follow_each_other_with_what_happens_per_second(server, capsys, monkeypatch):
    later = GOOD.replace("81920.0", "82020.0")
    server.texts = [GOOD, later, "nothing", GOOD]  # a restart: less than before
    slept, clock = [], iter(range(0, 100, 2))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert main(["top", "--url", server.url, "--every", "0.5"]) == 0
    out = capsys.readouterr().out
    checked = [line.split(",  ")[0] for line in out.splitlines() if line.startswith("checked")]
    assert [line.partition(" slots")[2].partition(",")[0] for line in checked] == ["", " (50/s)", ""]
    assert "it has no metrics of kvcanary" in out
    assert slept == [0.5] * 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm:num_requests_running 3\n", r"it has no metrics of kvcanary. .* KVCANARY_MODE=.*docs/vllm.md"),
        ("", "it has no metrics of kvcanary"),
        ('kvcanary_guarded{group="0} 1\n', "this line cannot be read: .*kvcanary_guarded"),
        ("kvcanary_forwards_total many\n", "this line cannot be read"),
    ],
)
def test_an_endpoint_without_readable_metrics(server, capsys, text, said):
    server.texts = [text]
    assert once(server) == 2
    assert re.search(said, capsys.readouterr().err)


def test_an_endpoint_that_is_not_there(server, capsys):
    server.status = 503
    assert once(server) == 2
    assert "it answers 503" in capsys.readouterr().err
    assert main(["top", "--url", "http://127.0.0.1:1/metrics", "--once"]) == 2
    assert "it cannot be read (" in capsys.readouterr().err


@pytest.mark.parametrize("url", [None, "localhost:8000", "file:///etc/hosts", "http://", "http://[", "http://h:x/m"])
def test_what_is_no_endpoint_is_refused(url, capsys):
    assert main(["top", "--once", *(["--url", url] if url is not None else [])]) == 2
    assert capsys.readouterr().err.startswith("kvcanary: ")


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_that_is_none(every, capsys):
    with pytest.raises(SystemExit):
        main(["top", "--url", "http://h/metrics", "--every", every])
    assert "is not a number of seconds above 0" in capsys.readouterr().err


def test_servers_behind_one_endpoint_are_summed_and_the_worst_one_counts():
    two = 'kvcanary_forwards_total{i="a"} 1 1700000000\nkvcanary_forwards_total{i="b"} 2\r\n'
    reading = read(two + 'kvcanary_guarded{group="0",i="a"} 1\nkvcanary_guarded{group="0",i="b"} 0\n')
    assert reading is not None
    assert reading.counts == {"kvcanary_forwards_total": 3}
    assert reading.unguarded == {"0": "no reason given"}
