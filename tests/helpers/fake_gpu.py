"""A GPU for tests without one: memory of the process, streams as queues that threads work off."""

from __future__ import annotations

import ctypes
import queue
import threading
import time

import torch

from overlapctl.errors import DeviceError


class Event:
    def __init__(self):
        self.done = threading.Event()


class Stream:
    def __init__(self, gpu):
        self.gpu = gpu
        self.tasks = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while (task := self.tasks.get()) is not None:
            task()

    def put(self, task):
        # A task that enqueues on its own stream means it to happen now, as on a GPU's stream.
        if threading.current_thread() is self.thread:
            task()
        else:
            self.tasks.put(task)


class FakeGpu:
    """One rank's driver; ranks are threads of one process, so peers' addresses are valid here."""

    is_cuda = False

    def __init__(self, memory_bytes=1 << 40, delay=lambda: 0.0):
        self.memory_bytes = memory_bytes
        self.delay = delay
        self.allocations = {}
        self.opened = []
        self.capturing = False
        self.exportable = True
        self.fills = 0
        self._current = threading.local()

    def allocate(self, size):
        if sum(a[1] for a in self.allocations.values()) + size > self.memory_bytes:
            raise DeviceError("out of memory", remedy="free some")
        buffer = torch.zeros(size + 512, dtype=torch.uint8)
        address = -(-buffer.data_ptr() // 512) * 512
        self.allocations[address] = (buffer, size)
        return address

    def free(self, address):
        del self.allocations[address]

    def export(self, address):
        if not self.exportable:
            raise DeviceError("not exportable", remedy="stage")
        return address.to_bytes(8, "little")

    def open(self, handle):
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, address):
        self.opened.remove(address)

    def map_host(self, address, size):
        return address

    def unmap_host(self, address):
        pass

    def create_stream(self):
        return Stream(self)

    def destroy_stream(self, stream):
        stream.put(None) if threading.current_thread() is not stream.thread else None

    def current_stream(self):
        if not hasattr(self._current, "stream"):
            self._current.stream = Stream(self)
        return self._current.stream

    def is_capturing(self):
        return self.capturing

    def record(self, stream):
        event = Event()
        stream.put(event.done.set)
        return event

    def wait_event(self, stream, event):
        stream.put(event.done.wait)

    def is_complete(self, event):
        return event.done.is_set()

    def copy(self, copies, stream):
        for c in copies:
            stream.put(lambda c=c: (time.sleep(self.delay()), ctypes.memmove(c.dst, c.src, c.size)))

    def fill(self, address, value, size, stream):
        self.fills += 1
        stream.put(lambda: ctypes.memset(address, value, size))

    def write_flag(self, address, value, stream):
        word = ctypes.c_uint32.from_address(address)
        stream.put(lambda: setattr(word, "value", value))

    def wait_flag(self, address, value, stream):
        word = ctypes.c_uint32.from_address(address)

        def wait():
            while (word.value - value) % (1 << 32) >= 1 << 31:
                time.sleep(20e-6)

        stream.put(wait)

    def allocation(self, address):
        return address, 0

    def view(self, address, numel, dtype):
        raw = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
        return torch.frombuffer(raw, dtype=dtype)

    def compute(self, work, stream):
        stream.put(lambda: (time.sleep(self.delay()), work()))

    def synchronize(self, limit_s=20):
        """Wait for the calling thread's current stream; tell whether it got there."""
        return self.record(self.current_stream()).done.wait(limit_s)


class Ranks:
    """Runs a function on every rank, each a thread with a GPU of its own."""

    def __init__(self, world, make_gpu=lambda rank: FakeGpu()):
        self.world = world
        self.gpus = [make_gpu(rank) for rank in range(world)]
        self._barrier = threading.Barrier(world)
        self._things = [None] * world

    def meeting(self, rank):
        def meet(thing):
            self._things[rank] = thing
            self._barrier.wait(20)
            things = list(self._things)
            self._barrier.wait(20)
            return things

        return meet

    def run(self, function):
        results, errors = [None] * self.world, []

        def body(rank):
            try:
                results[rank] = function(rank, self.gpus[rank])
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.world)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert not any(t.is_alive() for t in threads), "a rank hangs"
        if errors:
            raise errors[0]
        return results
