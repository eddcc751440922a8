"""Many clients at once, some of whom leave and some of whom talk nonsense: nobody is lost, nothing leaks."""

import asyncio

import pytest

from benchmarks.serving.crowds import Crowd, loaded
from tests.serving.server.live_server import running, small_engine


@pytest.mark.kernels
def test_200_streams_at_once(engine):
    crowd = Crowd(engine, seed=0)
    with running(engine) as server:
        asyncio.run(crowd.all_at_once(server.url))
        server.until(lambda: server.is_idle)
    assert not crowd.lost
    assert crowd.num_whole + crowd.num_left + crowd.num_refused == 200
    assert min(crowd.num_whole, crowd.num_left, crowd.num_refused) > 5


def test_a_client_that_is_told_something_else_is_lost(engine):
    crowd = Crowd(engine, seed=0, count=8)
    crowd._want = ["something else"] * 8
    with running(engine) as server:
        asyncio.run(crowd.all_at_once(server.url))
        server.until(lambda: server.is_idle)
    assert crowd.num_whole == 0
    assert len(crowd.lost) > 3


@pytest.mark.slow
def test_ten_minutes_of_it_take_no_more_memory():
    row = loaded(small_engine(max_num_seqs=16), seconds=600)
    assert row["lost"] == row["used_blocks"] == 0
    assert row["requests"] == 200 * len(row["resident_mib"])
    assert row["end_mib"] < row["settled_mib"] + 50, row
