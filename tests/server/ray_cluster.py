"""A Ray cluster on the loopback device alone, with a small object store, and the ends of its processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from served_app import wait_until


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[None]:
    """Until the end of the block."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_BACKEND_LOG_LEVEL="fatal")  # read by the first import
    import ray

    ray.init(
        address="local", include_dashboard=False, num_cpus=num_cpus, object_store_memory=100 << 20,
        log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def workers(title: str) -> list[psutil.Process]:
    """Ray's processes whose titles hold this, among those that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(title in part for part in process.cmdline()[:1]):
                found.append(process)
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def kill_one(title: str) -> None:
    """Ends one of them as the machine would that runs out of memory."""
    wait_until(lambda: workers(title))
    process = workers(title)[0]
    process.kill()
    process.wait(10)
