import pytest
import small_runs
import torch


@pytest.fixture(autouse=True)
def _threads():
    """A run sets torch's threads for itself and gives them back; the tests' own arithmetic stays on
    one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """One finished spectral run, to be read and copied, never written to."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    small_runs.run(folder)
    return folder
