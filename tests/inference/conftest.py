import pytest
import torch
from made_up import patients, settings, write

from zetaclip.training import train


@pytest.fixture(autouse=True)
def _threads():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def table_run(tmp_path_factory):
    """A run on a declared table: its folder, and the file that it was trained on."""
    top = tmp_path_factory.mktemp("table")
    data = write(top / "patients.csv", patients())
    train(settings(data), top / "run")
    return top / "run", data
