"""A service that classifies pictures, and gathers what many clients send into batches.

The clients are tasks of one asyncio program. Each awaits the answer to a picture before it sends the next one.
``predict`` is decorated with ``async_execution``: it puts the picture and a future into a queue, and returns the
future. So requests that wait occupy no thread of the server. One thread takes all requests that have come while the
model was busy, runs the model once for all of them, and sets their futures.

The model is trained on scikit-learn's pictures of digits. The table compares batches with one picture after the other.
"""

import argparse
import asyncio
import queue
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

import farprop
import farprop.rpc as rpc

TESTED = 360


class Service:
    """A model, and the requests that wait for it. It is on a worker."""

    def __init__(self, pictures: Tensor, digits: Tensor) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.rows = nn.GRU(8, 64, num_layers=2, bidirectional=True, batch_first=True)  # reads a picture row by row
        self.last = nn.Linear(8 * 128, 10)
        optimizer = torch.optim.Adam([*self.rows.parameters(), *self.last.parameters()], lr=0.006)
        for _ in range(100):
            batch = torch.randint(len(pictures), (64,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.scores(pictures[batch]), digits[batch]).backward()
            optimizer.step()
        self.largest = 1
        self.batches = 0
        self.requests: queue.SimpleQueue[tuple[Tensor, Future[int]]] = queue.SimpleQueue()
        threading.Thread(target=self.serve, daemon=True).start()

    def scores(self, pictures: Tensor) -> Tensor:
        return self.last(self.rows(pictures.view(-1, 8, 8))[0].flatten(1))

    @rpc.functions.async_execution
    def predict(self, picture: Tensor) -> Future[int]:
        answer: Future[int] = Future()
        self.requests.put((picture, answer))
        return answer

    def serve(self) -> None:
        torch.set_num_threads(1)  # each thread has a number of its own
        while True:
            gathered = [self.requests.get()]
            while len(gathered) < self.largest and not self.requests.empty():
                gathered.append(self.requests.get())
            pictures, answers = zip(*gathered, strict=True)
            try:
                with torch.inference_mode():
                    digits = self.scores(torch.stack(pictures)).argmax(1).tolist()
            except Exception as error:  # for those who asked; the service goes on
                for answer in answers:
                    answer.set_exception(error)
            else:
                for answer, digit in zip(answers, digits, strict=True):
                    answer.set_result(digit)
            self.batches += 1

    def begin(self, largest: int) -> None:
        """Begin a measurement, with batches of up to ``largest`` pictures."""
        self.largest, self.batches = largest, 0

    def count(self) -> int:
        """The batches of this measurement."""
        return self.batches


async def measure(service: Any, pictures: Tensor, digits: Tensor, clients: int, largest: int) -> tuple[float, ...]:
    """Have clients ask for each picture; return answers a second, the mean batch, and the share that is right."""
    await service.rpc_async().begin(largest)
    waiting = iter(range(len(pictures)))
    answers = {}

    async def client() -> None:
        for index in waiting:  # of all clients together
            answers[index] = await service.rpc_async().predict(pictures[index])

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    seconds = time.perf_counter() - began
    right = sum(answers[index] == digit for index, digit in enumerate(digits.tolist()))
    return len(pictures) / seconds, len(pictures) / await service.rpc_async().count(), right / len(pictures)


async def compare(service: Any, pictures: Tensor, digits: Tensor, most: int) -> None:
    print("clients  one by one    in batches  of", flush=True)
    clients = 1
    while clients <= most:
        single, _, right_single = await measure(service, pictures, digits, clients, largest=1)
        batched, size, right_batched = await measure(service, pictures, digits, clients, largest=64)
        assert right_single == right_batched
        print(f"{clients:7}  {single:8,.0f}/s  {batched:10,.0f}/s  {size:4.1f}", flush=True)
        clients *= 4
    print(f"{right_batched:.1%} of the answers are right, in batches or not.")


def main() -> int:
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=720, help="in each measurement (default: 720)")
    parser.add_argument("--clients", type=int, default=256, help="at most (default: 256)")
    given = parser.parse_args()
    if given.requests < 1 or given.clients < 1:
        parser.error("there has to be a request, and a client")
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    pictures, digits = torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]
    asked = torch.arange(given.requests) % TESTED
    try:
        with farprop.workers(1) as w:
            print("Training the model on a worker.", flush=True)
            service = w[0].remote(Service, pictures[TESTED:], digits[TESTED:])
            service.rpc_sync(timeout=0).count()
            asyncio.run(compare(service, pictures[asked], digits[asked], given.clients))
    except KeyboardInterrupt:
        print("Stopped.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
