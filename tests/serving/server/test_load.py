"""Many concurrent clients, some of which disconnect or send invalid requests."""

import asyncio

import pytest

from benchmarks.serving.crowds import Crowd, serve_crowds
from tests.serving.server.live_server import run_server, small_engine


@pytest.mark.kernels
def test_200_concurrent_streams_all_end_correctly(engine):
    crowd = Crowd(engine, seed=0)
    with run_server(engine) as server:
        asyncio.run(crowd.send_all(server.url))
        server.wait_until(lambda: server.is_idle)
    assert not crowd.lost
    assert crowd.num_whole + crowd.num_left + crowd.num_refused == 200
    assert min(crowd.num_whole, crowd.num_left, crowd.num_refused) > 5


def test_wrong_response_is_detected(engine):
    crowd = Crowd(engine, seed=0, count=8)
    crowd._expected = ["something else"] * 8
    with run_server(engine) as server:
        asyncio.run(crowd.send_all(server.url))
        server.wait_until(lambda: server.is_idle)
    assert crowd.num_whole == 0
    assert len(crowd.lost) > 3


@pytest.mark.slow
def test_ten_minutes_of_load_leak_no_memory():
    row = serve_crowds(small_engine(max_num_seqs=16), seconds=600)
    assert row["lost"] == row["used_blocks"] == 0
    assert row["requests"] == 200 * len(row["resident_mib"])
    assert row["end_mib"] < row["settled_mib"] + 50, row
