"""Processes that form one group and run checks together, one after the other: starting them is the
expensive part."""

import contextlib
import multiprocessing
import os
import traceback
import warnings


def _serve(rank, count, pipe):
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Rank 0 takes whatever port is free and tells it.
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, count, True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), count, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, arguments = task
        torch.manual_seed(1234)
        try:
            answer = (True, function(rank, *arguments))
        except BaseException as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        pipe.send(answer)
    dist.destroy_process_group()


class Pool:
    """``count`` ranks on this machine."""

    def __init__(self, count):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "zetaclip.training.start",
                "zetaclip.data",
                "zetaclip.models",
                "zetaclip.methods",
                "opacus",
                "torch._dynamo",
                "rank_work",
            ]
        )
        self.count = count
        self.processes, self.pipes = [], []
        for rank in range(count):
            pipe, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, other), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(pipe)
            other.close()
        port = self._receive(0)
        for pipe in self.pipes[1:]:
            pipe.send(port)

    def _receive(self, rank, seconds=120):
        if not self.pipes[rank].poll(seconds):
            raise TimeoutError(f"rank {rank} has not answered for {seconds} s")
        return self.pipes[rank].recv()

    def start(self, function, *arguments):
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def answers(self, ranks=None):
        """(True, value) or (False, (kind of error, message, traceback)) of each rank."""
        return [self._receive(rank) for rank in (range(self.count) if ranks is None else ranks)]

    def run(self, function, *arguments):
        """``function(rank, *arguments)`` on every rank; all of their values."""
        self.start(function, *arguments)
        answers = self.answers()
        for rank, (fine, value) in enumerate(answers):
            assert fine, f"rank {rank}: {value[2]}"
        return [value for _, value in answers]

    def errors(self, function, *arguments):
        """The errors that every rank raises."""
        self.start(function, *arguments)
        answers = self.answers()
        assert not any(fine for fine, _ in answers), answers
        return [f"{value[0]}: {value[1]}" for _, value in answers]

    def close(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it may be gone already
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def kill(self):
        """For ranks that can't answer any more."""
        for process in self.processes:
            process.kill()
            process.join()
