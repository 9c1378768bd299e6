"""The example inside Ray Train, with a worker killed in the middle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In a process of its own: Ray warns of many things, and warnings are errors here.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path

import ray


def loop(config):
    import ray.train
    import ray_train
    import torch

    from zetaclip.engine._optimizer import PrivateOptimizer

    torch.set_num_threads(1)
    folder = Path(config["folder"])
    rank = ray.train.get_context().get_world_rank()
    (folder / f"start {rank} {os.getpid()}").touch()
    step, taken = PrivateOptimizer.step, 0

    def dying(self, closure=None):
        nonlocal taken
        step(self, closure)
        taken += 1
        if rank == 1 and taken == 17 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    PrivateOptimizer.step = dying
    try:
        ray_train.train_loop(config)
    finally:
        PrivateOptimizer.step = step


if __name__ == "__main__":
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder = sys.argv[1]
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    result = TorchTrainer(
        loop,
        train_loop_config={"epochs": 3, "folder": folder},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=folder + "/ray", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    Path(folder, "metrics.json").write_text(json.dumps(result.metrics))
    ray.shutdown()
"""


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_its_steps_are_replayed(tmp_path):
    pytest.importorskip("ray.train", reason="needs the extra: pip install 'zetaclip[ray]'")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "run"
    folder.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'examples'}",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (folder / "died").exists() and len(list(folder.glob("start *"))) == 4
    metrics = json.loads((folder / "metrics.json").read_text())
    # It went on from the checkpoint after the first epoch. The five updates that were executed
    # after it came again with the same noise on the same batches, so they count once.
    assert metrics["started_at"] == 12 and metrics["updates"] == metrics["releases"] == 36
    assert 2.9 < metrics["epsilon"] <= 3.0
    rows = [
        json.loads(line)
        for path in folder.glob("*.journal")
        for line in path.read_text().splitlines()
        if "noise_std" in line
    ]
    executed = [row["step"] for row in rows]
    assert set(executed) == set(range(36)) and len(executed) > 36, (
        "steps between the checkpoint and the kill come twice"
    )
    assert len({row["stream"] for row in rows}) == 1
