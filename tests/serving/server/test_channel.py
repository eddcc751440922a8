"""Message order, batching and disconnection of channels."""

import queue
import socket
import threading
import time
import weakref

import pytest

from jattn.serving.server.channel import Channel


class End:
    """A channel and the messages that it received."""

    def __init__(self, sock, on_messages=None):
        self.channel, self.received, self.is_lost = Channel(sock), queue.Queue(), threading.Event()
        self.channel.start(on_messages or self.received.put, self.is_lost.set)

    def lost(self):
        return self.is_lost.wait(10)


@pytest.fixture
def ends():
    first, second = (End(sock) for sock in socket.socketpair())
    yield first, second
    first.channel.close()
    second.channel.close()


def test_messages_arrive_in_order_in_both_directions(ends):
    for sender, reader in (ends, ends[::-1]):
        for number in range(100):
            sender.channel.post(number)
        received = []
        while len(received) < 100:
            received += reader.received.get(timeout=10)
        assert received == list(range(100))


def test_messages_posted_before_close_still_arrive(ends):
    first, second = ends
    first.channel.post("last")
    first.channel.close()
    assert second.received.get(timeout=10) == ["last"]


def test_join_reader_waits_until_the_reader_has_released_its_objects():
    """An engine that is released after the interpreter has ended would abort the process."""

    class Held:
        def take(self, messages):
            pass

    held, (sock, second) = Held(), socket.socketpair()
    channel, gone = Channel(sock), weakref.ref(held)
    channel.join_reader(1.0)  # The reader has not started.
    channel.start(held.take, lambda: time.sleep(0.2))
    del held
    second.close()
    channel.join_reader(10.0)
    assert gone() is None
    channel.close()


def test_message_that_cannot_be_pickled_closes_both_ends(ends, caplog):
    ends[0].channel.post(lambda: "of no module")
    assert all(end.lost() for end in ends)
    assert "Failed to send" in caplog.text


def test_failing_message_handler_closes_both_ends(caplog):
    def fails(messages):
        raise KeyError(messages)

    local_socket, remote_socket = socket.socketpair()
    first, second = End(local_socket), End(remote_socket, fails)
    first.channel.post("anything")
    assert first.lost()
    assert second.lost()
    assert "Failed to handle" in caplog.text
    first.channel.close()
    second.channel.close()


def test_messages_of_several_threads_arrive_in_each_threads_order(ends):
    first, second = ends

    def post(thread):
        for number in range(200):
            first.channel.post((thread, number, b"x" * (10, 5_000, 100_000)[number % 3]))

    threads = [threading.Thread(target=post, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    received = {thread: [] for thread in range(4)}
    for _ in range(800):
        for thread, number, _ in second.received.get(timeout=10):
            received[thread].append(number)
        if all(len(numbers) == 200 for numbers in received.values()):
            break
    for thread in threads:
        thread.join()
    assert all(numbers == list(range(200)) for numbers in received.values())
