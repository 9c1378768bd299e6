"""Training on the machines of a Ray cluster that share the results folder.

Ray restarts a task whose worker died; the task finds the run folder and resumes it. The training
process of a dead worker is ended, so that two never write to one folder. Every machine needs
zetaclip installed, the data, and the folder at the same path.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

from ..errors import CommandError
from .runner import Job, start_training, stop_processes

# A worker may die this often before its run counts as failed.
_RETRIES = 10


def train_on_worker(job: Job) -> int:
    """Runs or resumes one training in a Ray worker; returns its exit code."""
    process = start_training(job)
    try:
        return process.wait()
    except BaseException:  # cancelled: let the training save first
        stop_processes([process])
        raise


class RayBackend:
    """Runs training on a Ray cluster.

    Args:
        address: HOST:PORT of a running cluster, "auto" for this machine's own, or "local" to start
            one here.
        threads: Threads of each training.
        workers: The largest number of runs at a time; default: as many as fit.

    Raises:
        CommandError: Ray is not installed, or no cluster answers.
    """

    def __init__(self, address: str, threads: int, workers: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise CommandError("--ray needs Ray: pip install 'zetaclip[ray]'") from error
        _check_reachable(address)
        self.ray = ray
        self.started = not ray.is_initialized()
        if self.started:
            # Only a cluster that is started here can be told its size.
            size: dict[str, Any] = {"num_cpus": workers} if address == "local" else {}
            try:
                ray.init(
                    address=address, log_to_driver=False, logging_level=logging.WARNING, **size
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise CommandError(
                    f"no Ray cluster answers at {address}: {error}. If it needs a token, set"
                    " RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on the cluster"
                ) from error
        total = int(ray.cluster_resources().get("CPU", 1))
        self.slots = min(workers or total, max(1, total // threads))
        self.remote = ray.remote(num_cpus=threads, max_retries=_RETRIES)(train_on_worker)

    def start(self, job: Job) -> Any:
        """Starts a training; returns its handle."""
        return self.remote.remote(job)

    def poll(self, handle: Any) -> int | None:
        """The exit code, or None while it runs."""
        ready, _ = self.ray.wait([handle], timeout=0)
        if not ready:
            return None
        try:
            return int(self.ray.get(handle))
        except self.ray.exceptions.RayError:
            return 1  # its log has the message

    def stop(self, handles: Sequence[Any]) -> None:
        """Cancels trainings and waits until they have saved."""
        for handle in handles:
            self.ray.cancel(handle)
        if handles:
            self.ray.wait(list(handles), num_returns=len(handles), timeout=40)

    def close(self) -> None:
        """Disconnects from a cluster that was joined or started here."""
        if self.started:
            self.ray.shutdown()


def _check_reachable(address: str) -> None:
    """Checks the address; Ray itself tries for minutes before it reports that nobody answers."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # "auto" and "local"
    if not port.isdigit():
        raise CommandError(f"--ray takes auto, local or HOST:PORT, not {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise CommandError(f"no Ray cluster answers at {address}: {error}") from error
