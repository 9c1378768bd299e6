"""A real Ray on this machine: the same results, and a worker killed in the middle loses nothing."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zetaclip.errors import CommandError
from zetaclip.experiments import ray_backend, session, spec

# Starts a cluster of two slots, says where it is, and ends it when its input ends.
CLUSTER = """
import sys, ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""

# A token of this test's own, for its cluster and its client: nobody else on the network may run
# code there.
SECURED = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="ray is not installed: pip install 'zetaclip[ray]'")
    environment = {**os.environ, **SECURED}
    environment["ZETACLIP_TRAIN_COMMAND"] = (
        f"{sys.executable} -I {Path(__file__).with_name('stand_in.py')}"
    )
    environment |= {
        "STAND_IN_PAUSE": "0.1",
        "STAND_IN_STEPS": "40",
    }  # workers inherit it from the cluster
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    try:
        address = process.stdout.readline().strip()
        assert address, "ray did not start"
        yield address
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
        process.stdout.close()


def reproduce(mini_file, out, address):
    words = ["--out", str(out), "--ray", address, "--only", "seed=1"]
    return subprocess.Popen(
        [sys.executable, "-m", "zetaclip", "reproduce", str(mini_file), *words],
        env={**os.environ, **SECURED},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def attempts(folder):
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_loses_nothing(cluster, mini_file, tmp_path):
    out = tmp_path / "out"
    process = reproduce(mini_file, out, cluster)
    try:
        deadline = time.monotonic() + 120
        victim = None
        while victim is None:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
            for checkpoint in out.glob("runs/*/private"):
                with contextlib.suppress(OSError, ValueError):
                    if int(checkpoint.read_text()) >= 5:
                        victim = checkpoint.parent
        (first,) = attempts(victim)
        worker = parent(first["pid"])
        assert b"ray" in Path(f"/proc/{worker}/cmdline").read_bytes()
        os.kill(worker, signal.SIGKILL)
        said, errors = process.communicate(timeout=240)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors
    assert not Path(f"/proc/{first['pid']}").exists()  # the training ended with its worker
    again = attempts(victim)
    assert len(again) == 2 and again[1]["from"] >= 5 and again[1]["resume"]
    folders = list(out.glob("runs/*"))
    # Four rungs of the ladder, three runs of seed 1, and one of seed 2 to replay.
    assert len(folders) == 4 + 4
    assert all((folder / "result.json").exists() for folder in folders)
    assert sum(len(attempts(folder)) for folder in folders) == len(folders) + 1
    assert "4 of 9 runs" in said


@pytest.mark.parametrize(
    ("address", "message"), [("127.0.0.1:1", "no Ray cluster answers"), ("there:x", "HOST:PORT")]
)
def test_no_cluster_there(address, message):
    with pytest.raises(CommandError, match=message):
        ray_backend._check_reachable(address)


def test_ray_that_is_not_installed(mini_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    request = session.Request(spec.load(str(mini_file)), str(tmp_path / "out"), ray="auto")
    with pytest.raises(CommandError, match=r"pip install 'zetaclip\[ray\]'"):
        session.reproduce(request)
