"""Messages between two processes: in order, put together, and an end that both ends hear of."""

import queue
import socket
import threading
import time
import weakref

import pytest

from jattn.serving.server.channel import Channel


class End:
    """A channel, and what came by it."""

    def __init__(self, sock, take=None):
        self.channel, self.came, self.is_lost = Channel(sock), queue.Queue(), threading.Event()
        self.channel.start(take or self.came.put, self.is_lost.set)

    def lost(self):
        return self.is_lost.wait(10)


@pytest.fixture
def ends():
    one, other = (End(sock) for sock in socket.socketpair())
    yield one, other
    one.channel.close()
    other.channel.close()


def test_messages_come_in_their_order_both_ways(ends):
    for sender, reader in (ends, ends[::-1]):
        for number in range(100):
            sender.channel.post(number)
        found = []
        while len(found) < 100:
            found += reader.came.get(timeout=10)
        assert found == list(range(100))


def test_posting_does_not_wait_for_who_does_not_read():
    """A socket holds some 200 KB."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    for _ in range(50):
        channel.post(b"x" * 100_000)
    other = Channel(theirs)
    found = 0
    while found < 50:
        found += len(other.read())
    channel.close()
    other.close()


def test_what_was_posted_before_the_end_still_comes(ends):
    one, other = ends
    one.channel.post("last")
    one.channel.close()
    assert other.came.get(timeout=10) == ["last"]


def test_who_waits_until_it_is_lost_finds_the_reader_gone():
    """With all that it held: an engine that it drops behind the interpreter's end aborts the process."""

    class Held:
        def take(self, messages):
            pass

    held, (sock, other) = Held(), socket.socketpair()
    channel, gone = Channel(sock), weakref.ref(held)
    channel.wait_until_lost(1.0)  # nothing has begun
    channel.start(held.take, lambda: time.sleep(0.2))
    del held
    other.close()
    channel.wait_until_lost(10.0)
    assert gone() is None
    channel.close()


def test_what_cannot_be_sent_ends_both_ends(ends, caplog):
    ends[0].channel.post(lambda: "of no module")
    assert all(end.lost() for end in ends)
    assert "could not be sent" in caplog.text


def test_what_cannot_be_taken_ends_both_ends(caplog):
    def fails(messages):
        raise KeyError(messages)

    ours, theirs = socket.socketpair()
    one, other = End(ours), End(theirs, fails)
    one.channel.post("anything")
    assert one.lost()
    assert other.lost()
    assert "could not be taken" in caplog.text


def test_messages_of_several_threads_all_come_each_thread_s_in_their_order(ends):
    """More than the socket holds, so that now who posts sends and now the thread that waits."""
    one, other = ends

    def post(thread):
        for number in range(200):
            one.channel.post((thread, number, b"x" * (5_000 if number % 3 else 10)))

    threads = [threading.Thread(target=post, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    found = {thread: [] for thread in range(4)}
    for _ in range(800):
        for thread, number, _ in other.came.get(timeout=10):
            found[thread].append(number)
        if all(len(numbers) == 200 for numbers in found.values()):
            break
    for thread in threads:
        thread.join()
    assert all(numbers == list(range(200)) for numbers in found.values())
