"""The code of the guides runs as it stands there."""

import re

import rank_work
import torch
from helpers import code_of


def test_the_loop_of_several_processes(two):
    (first, weights), (second, others) = two.run(
        rank_work.page, code_of("docs/guides/distributed.md")
    )
    found = re.fullmatch(
        r"rank 0: ε = ([\d.]+), C = ([\d.]+)\nrank 0: ε = ([\d.]+), 16 of 32 rows\n", first
    )
    assert 2.9 < float(found[1]) <= 3.0 and 2.9 < float(found[3]) <= 3.0
    assert second == first.replace("rank 0", "rank 1") and torch.equal(weights, others)


def test_a_ray_worker_begins_and_resumes(tmp_path):
    names = {}
    exec(code_of("docs/guides/ray.md"), names)
    wholes = []
    for _ in range(2):
        engine, module, optimizer, loader = rank_work.make(seed=3, steps=4)
        path = names["resume_or_begin"](engine, tmp_path)
        assert engine.updates == (2 if wholes else 0)
        if not wholes:
            rank_work.loop(module, optimizer, loader, 2)
            engine.save(path)
        rank_work.loop(module, optimizer, loader, 2)
        wholes.append((rank_work.flat(module), rank_work.finish(engine)))
    assert torch.equal(wholes[0][0], wholes[1][0]) and wholes[0][1] == wholes[1][1]
