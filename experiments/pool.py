"""Several jobs at once, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")


def results(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, threads: int
) -> Iterator[tuple[Job, Result]]:
    """Yield jobs with their results, as they are finished.

    Args:
        function: does a job; other processes must be able to import it.
        jobs: the first is begun first.
        workers: how many processes.
        threads: how many threads torch has in each.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share torch's threads
    with ProcessPoolExecutor(workers, context, _begin_worker, (threads,)) as pool:
        futures = {pool.submit(function, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's process would go on with the jobs that are queued for it, though nobody takes the results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
