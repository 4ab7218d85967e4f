"""Dask workers, one a GPU: started here, or found at an address."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from chord_lab.errors import UserError
from chord_lab.measurement.nvml import visible_gpus

EXPECT_WORKERS_S = 60.0


@contextmanager
def connect(where: str, gpus: list[str] | None) -> Iterator[Any]:
    """A client of the workers at `where`; nothing started here listens beyond 127.0.0.1."""
    try:
        import dask
        from distributed import Client
    except ImportError:
        raise UserError("--dask needs dask.distributed: pip install 'chord-lab[dask]'") from None
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        if where in ("local", "cuda"):
            cluster: Any = _local(gpus) if where == "local" else _cuda()
        else:
            cluster = nullcontext(where)
        with cluster as address, _client(Client, address, where) as client:
            yield client


def _client(Client: Any, address: Any, where: str) -> Any:
    try:
        return Client(address, timeout=5)
    except (OSError, ValueError, TimeoutError) as error:
        raise UserError(
            f"--dask {where}: no scheduler answers ({type(error).__name__}); legal: local, cuda, or an address such as "
            "tcp://host:8786"
        ) from None


def _local(gpus: list[str] | None) -> Any:
    """A worker process for each GPU of this host, each seeing its own alone."""
    from distributed import Nanny, Scheduler, SpecCluster

    gpus = visible_gpus() if gpus is None else gpus
    if not gpus:
        raise UserError("--dask local starts one worker a GPU and no GPU is visible (`chord-lab doctor` says why)")
    quiet = {"dashboard": False, "host": "127.0.0.1"}
    workers = {
        f"gpu{index}": {
            "cls": Nanny,
            "options": {
                **quiet,
                "silence_logs": logging.ERROR,
                "nthreads": 1,
                "resources": {"GPU": 1},
                "env": {"CUDA_VISIBLE_DEVICES": gpu},
            },
        }
        for index, gpu in enumerate(gpus)
    }
    return SpecCluster(
        workers=workers, scheduler={"cls": Scheduler, "options": {**quiet, "port": 0}}, silence_logs=logging.ERROR
    )


def _cuda() -> Any:
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError:
        raise UserError("--dask cuda needs dask-cuda; --dask local does the same without it") from None
    return LocalCUDACluster(threads_per_worker=1, resources={"GPU": 1}, host="127.0.0.1", dashboard_address=None)


def wait_for_workers(client: Any) -> None:
    """A scheduler without GPU workers would wait for ever."""
    deadline = time.monotonic() + EXPECT_WORKERS_S
    while time.monotonic() < deadline:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        if any(worker.get("resources", {}).get("GPU") for worker in workers):
            return
        time.sleep(0.2)
    raise UserError(
        f"no dask worker with resources GPU=1 came within {EXPECT_WORKERS_S:g} s; start them with "
        "`dask worker ADDRESS --nthreads 1 --resources GPU=1`, one a GPU"
    )
