"""`jattn bench-serve` with a server on this machine."""

import asyncio
import json
import random
import re
import time

import pytest

from jattn.serving.cli.bench_serve import RequestTimes, format_row, send_at_rate, summarize
from jattn.serving.cli.main import main


class TestBenchServe:
    @pytest.mark.kernels
    def test_each_rate_is_printed_written_and_plotted(self, server, capsys, tmp_path):
        files = [f"--json={tmp_path / 'rows.json'}", f"--plot={tmp_path / 'plot.svg'}"]
        sizes = ["--num-prompts=6", "--input-len=20", "--output-len=9", "--request-rate", "50", "200"]
        words = ["bench-serve", f"--url={server.url}", "--api-key=secret", *files, *sizes]
        assert main(words) == 0
        rows = json.loads((tmp_path / "rows.json").read_text())
        assert [row["request_rate"] for row in rows] == [50, 200]
        for row in rows:
            assert (row["num_ok"], row["num_failed"], row["errors"]) == (6, 0, [])
            assert row["tokens_per_second"] == pytest.approx(54 / row["seconds"])
            for times in (row[f"{name}_ms"] for name in ("time_to_first_token", "end_to_end")):
                assert 0 < times["p50"] <= times["p90"] <= times["p99"]
        assert (tmp_path / "plot.svg").read_text().count("requests per second") > 0
        assert len(capsys.readouterr().out.splitlines()) == 2 + 2

    def test_infinite_rate_is_written_as_valid_json(self, server, tmp_path):
        sizes = ["--num-prompts=2", "--input-len=3", "--output-len=2", "--request-rate", "inf"]
        file = tmp_path / "rows.json"
        assert main(["bench-serve", f"--url={server.url}", "--api-key=secret", f"--json={file}", *sizes]) == 0
        (row,) = json.loads(file.read_text(), parse_constant=pytest.fail)
        assert (row["request_rate"], row["num_ok"]) == ("inf", 2)

    def test_failed_requests_are_counted_and_printed(self, server, capsys, tmp_path):
        sizes = ["--num-prompts=2", "--input-len=20", "--output-len=9", "--request-rate=99"]
        file = tmp_path / "rows.json"
        assert main(["bench-serve", f"--url={server.url}", f"--json={file}", *sizes]) == 1
        out, err = capsys.readouterr()
        assert "HTTP 401: Invalid API key." in out
        assert err == "jattn: All requests failed; see the errors above.\n"
        (row,) = json.loads(file.read_text(), parse_constant=pytest.fail)  # NaN is not valid JSON.
        assert row["end_to_end_ms"] == {"p50": None, "p90": None, "p99": None, "mean": None}

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--json=no/such/rows.json"], "no/such/rows.json"),
            (["--plot=no/such/rows.svg"], "no/such/rows.svg"),
            (
                ["--plot=rows.nonsense"],
                "--plot must have one of the file extensions .*svg.*, got rows.nonsense",
            ),
            (["--url=http://x:99999"], "--url must have the form http://HOST:PORT, got http://x:99999"),
        ],
    )
    def test_invalid_file_or_url_is_reported_before_the_run(self, capsys, words, message):
        assert main(["bench-serve", "--url=http://127.0.0.1:1", *words]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert re.search(message, err)

    def test_latency_includes_the_delay_of_a_late_sender(self):
        """All five requests are due at once, and each one delays the next by 20 ms."""

        async def send(prompt, due):
            time.sleep(0.02)
            return RequestTimes([time.perf_counter() - due])

        requests = asyncio.run(send_at_rate(send, [[1]] * 5, 1e9, random.Random(0)))
        firsts = [times.arrivals[0] for times in requests]
        assert firsts == sorted(firsts)
        assert firsts[-1] >= 5 * 0.02 - 1e-3

    def test_summary_reports_percentiles_in_milliseconds(self):
        requests = [
            RequestTimes([1.0, 1.5, 2.5], 3.0, 4),
            RequestTimes([2.0], 2.0, 1),
            RequestTimes(error="gone"),
        ]
        row = summarize(requests, 1.0, 10.0)
        assert (row["num_ok"], row["num_failed"], row["tokens_per_second"]) == (2, 1, 0.5)
        assert row["time_to_first_token_ms"]["p50"] == 1500
        assert row["time_to_first_token_ms"]["mean"] == 1500
        assert row["inter_token_latency_ms"]["p50"] == 750
        assert format_row(row).endswith("\n  gone")

    def test_invalid_url_is_an_error_of_one_line(self, capsys):
        assert main(["bench-serve", "--url", "nonsense"]) == 1
        assert capsys.readouterr().err == "jattn: --url must have the form http://HOST:PORT, got nonsense.\n"

    def test_every_rate_must_be_positive(self, capsys):
        assert main(["bench-serve", "--url=http://127.0.0.1:1", "--request-rate", "4", "nan"]) == 1
        assert "request_rate must be positive, got nan" in capsys.readouterr().err

    def test_sizes_must_be_positive(self, capsys):
        assert main(["bench-serve", "--num-prompts=0"]) == 1
        assert "num_prompts must be positive, got 0" in capsys.readouterr().err
